// The parts of the harness. Those of the host need no CUDA, so that they are tested on machines without it.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "../ladder.h"

namespace ladder {

// ---- options.cc

enum class Input { random, constant, file };

struct Options {
  Problem problem;
  std::string kernel;  // the name of one of rung.kernels
  Pairing rope = Pairing::none;
  int d_model = 0;  // 0: attention alone; else a whole layer, with projections from and to d_model
  Input input = Input::random;
  std::filesystem::path file;
  int warmup = 3, runs = 20;
  bool check = true, json = false, cache = true;
  std::filesystem::path cache_dir;
};

// What stops a program before it has computed anything: text for stderr (for --help: stdout) and the exit status.
struct Stop {
  std::string text;
  int status;
};

constexpr int kWrong = 1, kUsage = 2, kNoGpu = 77;  // exit statuses; 0: the check passed or was not asked for

// Throws Stop.
Options parse(int argc, const char* const* argv, const Rung& rung);

const Kernel& kernel_of(const Rung& rung, const std::string& name);
const char* name_of(Element element);
const char* name_of(Pairing pairing);

// ---- inputs.cc

struct Tensors {
  std::vector<float> q, k, v;  // [batch, heads, seq, dim]
};

// A layer of width d_model: q = x wq (columns are [heads, dim]) and so on, y = o wo.
struct Layer {
  std::vector<float> x;           // [batch, seq, d_model]
  std::vector<float> wq, wk, wv;  // [d_model, heads dim]
  std::vector<float> wo;          // [heads dim, d_model]
};

// Random values are normal and, like ones, exact in f32, f16 and bf16, so that all rungs compute the same problem.
// Those of a file are rounded to the element type. Throws Stop where the file does not fit.
Tensors make_tensors(const Options& options, Element element);
Layer make_layer(const Options& options);

// The nearest value of an element type, ties to even; f16 has infinities beyond 65504.
float round_to(Element element, float x);

// [seq, dim / 2], computed in float64: position p turns pair c by p 10000^(-2c / dim).
std::vector<Rotation> make_rotations(int seq, int dim);

// ---- reference.cc

// Runs f(0) to f(count - 1) on all cores. A name prints a progress line to stderr.
void parallel_for(int64_t count, const std::function<void(int64_t)>& f, const char* name = nullptr);

// softmax(scale q k^T) v in float64.
std::vector<double> reference_attention(const Problem& problem, const std::vector<double>& q,
                                        const std::vector<double>& k, const std::vector<double>& v);

// Rotates x [heads, seq, dim] in float64.
void reference_rope(std::vector<double>& x, int64_t heads, int seq, int dim, Pairing pairing);

// a [m, k] times b [k, n] in float64.
std::vector<double> reference_product(const std::vector<double>& a, const std::vector<float>& b, int64_t m, int64_t k,
                                      int64_t n);

// q and k as the attention of a rung should see them, in float64: rotated and, where the harness and not the rung
// rotates, rounded to the element type.
struct Rotated {
  std::vector<double> q, k;
};
Rotated rotate(const Options& options, const Rung& rung, const Tensors& tensors);

struct Errors {
  double relative_l2 = 0;  // of the worst head: |o - reference| / |reference|
  double max_absolute = 0;
  int64_t not_finite = 0;
  bool passed = false;
};

// Compares o with the reference, heads as [heads, elements of one]. Passes where every head's relative L2 error is at
// most bound, no value is further off than bound times largest, and all are finite.
Errors compare(const std::vector<float>& o, const std::vector<double>& reference, int64_t heads, double bound,
               double largest);

// How far a correct kernel may be off, relative to the values that it averages. The sum of: the rounding of P and of o
// to the element type, f32 sums over seq keys, and what f32 sums over dim channels do to scores of at most the given
// size, which exp hands on to P. The roundings of a sum of n random numbers add up like sqrt(n); those of equal numbers
// can all go the same way and add up like n.
double error_bound(const Problem& problem, Element element, double largest_score, bool equal = false);

// ---- cache.cc

// A reference result on disk. An entry is returned only if its version, its key, its size and its checksum are right.
class Cache {
 public:
  Cache(bool enabled, std::filesystem::path folder) : enabled_(enabled), folder_(std::move(folder)) {}
  // The entry under key, else compute(), which is then stored. A folder that cannot be written costs a warning.
  std::vector<double> get(const std::string& key, size_t count, const std::function<std::vector<double>()>& compute);
  bool hit() const { return hit_; }

 private:
  bool enabled_, hit_ = false;
  std::filesystem::path folder_;
};

// 128 bits in hexadecimal, of everything that was added.
class Hash {
 public:
  void add(const void* data, size_t bytes);
  void add(int64_t x) { add(&x, sizeof x); }
  template <typename T>
  void add(const std::vector<T>& x) {
    add(static_cast<int64_t>(x.size()));
    add(x.data(), x.size() * sizeof(T));
  }
  std::string hex() const;

 private:
  uint64_t a_ = 0x9e3779b97f4a7c15, b_ = 0xc2b2ae3d27d4eb4f;
};

// $XDG_CACHE_HOME/octet-ladder, else ~/.cache/octet-ladder.
std::filesystem::path default_cache_dir();

// ---- device.cu: what the harness itself runs on the GPU

void to_element(Element element, const float* from, void* to, int64_t count, cudaStream_t stream);
void to_float(Element element, const void* from, float* to, int64_t count, cudaStream_t stream);
// Rotates x [heads, seq, dim] in place.
void rope(Element element, void* x, int64_t heads, int seq, int dim, const Rotation* rotations, Pairing pairing,
          cudaStream_t stream);
// x [batch, seq, d_model] times w [d_model, heads dim], stored as [batch, heads, seq, dim].
void project_in(Element element, const Problem& problem, int d_model, const void* x, const void* w, void* q,
                cudaStream_t stream);
// o [batch, heads, seq, dim] times w [heads dim, d_model], stored as [batch, seq, d_model].
void project_out(Element element, const Problem& problem, int d_model, const void* o, const void* w, void* y,
                 cudaStream_t stream);

}  // namespace ladder
