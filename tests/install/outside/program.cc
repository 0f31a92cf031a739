// A call of each kind from C++: attention that works, and one that must throw.
#include <cmath>
#include <iostream>
#include <octet/formats.hpp>
#include <octet/octet.hpp>
#include <vector>

int main() {
  const octet::Shape shape{1, 2, 33, 16};
  const auto n = static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]);
  std::vector<float> q(n, .5f), k(n, .25f), v(n, 3.f), o(n);
  const octet::Forward call{
      .q = {q.data(), shape}, .k = {k.data(), shape}, .v = {v.data(), shape}, .o = {o.data(), shape}};
  octet::run({.precision = octet::Precision::f32, .causal = true}, call);
  for (const float x : o)
    if (std::fabs(x - 3.f) > 1e-5f) return std::cerr << "a mean of threes is " << x << '\n', 1;
  try {
    octet::run({.precision = octet::Precision::f32, .softcap = -30.f}, call);
    return std::cerr << "a negative softcap was accepted\n", 1;
  } catch (const octet::Error& error) {
    if (error.status() != OCTET_INVALID_ARGUMENT) return 1;
    std::cout << "octet " << octet_version() << " from C++: " << error.what() << '\n';
  }
  return 0;
}
