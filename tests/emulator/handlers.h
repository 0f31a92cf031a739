// What instructions do, for a warp at a time. An instruction's operands are places of registers.
#pragma once
#include <bit>
#include <cstring>

#include "arithmetic.h"
#include "program.h"

namespace emulator {

using Handler = void (*)(Warp&, const Instruction&, Lanes);

template <class F>
void each(Lanes lanes, const F& f) {
  if (lanes == kAllLanes)
    for (int i = 0; i < kLanes; ++i) f(i);
  else
    for (; lanes; lanes &= lanes - 1) f(std::countr_zero(lanes));
}

// Handlers of functions of one to three values.
template <auto f, class D, class A>
void unary(Warp& w, const Instruction& n, Lanes lanes) {
  D* d = w.at<D>(n.operand[0]);
  const A* a = w.at<A>(n.operand[1]);
  each(lanes, [&](int i) { d[i] = f(a[i]); });
}
template <auto f, class D, class A, class B>
void binary(Warp& w, const Instruction& n, Lanes lanes) {
  D* d = w.at<D>(n.operand[0]);
  const A* a = w.at<A>(n.operand[1]);
  const B* b = w.at<B>(n.operand[2]);
  each(lanes, [&](int i) { d[i] = f(a[i], b[i]); });
}
template <auto f, class D, class A, class B, class C>
void ternary(Warp& w, const Instruction& n, Lanes lanes) {
  D* d = w.at<D>(n.operand[0]);
  const A* a = w.at<A>(n.operand[1]);
  const B* b = w.at<B>(n.operand[2]);
  const C* c = w.at<C>(n.operand[3]);
  each(lanes, [&](int i) { d[i] = f(a[i], b[i], c[i]); });
}

template <u16 (*to)(float)>
void convert_pair(Warp& w, const Instruction& n, Lanes lanes) {  // the first source becomes the upper half
  u32* d = w.at<u32>(n.operand[0]);
  const f32 *a = w.at<f32>(n.operand[1]), *b = w.at<f32>(n.operand[2]);
  each(lanes, [&](int i) { d[i] = static_cast<u32>(to(a[i])) << 16 | to(b[i]); });
}

// cvt of what is no register of its own size: reads and writes registers that may be wider.
inline u64 read(const void* registers, u8 bytes, int lane) {
  switch (bytes) {
    case 1:
      return static_cast<const u8*>(registers)[lane];
    case 2:
      return static_cast<const u16*>(registers)[lane];
    case 4:
      return static_cast<const u32*>(registers)[lane];
    default:
      return static_cast<const u64*>(registers)[lane];
  }
}
inline void write(void* registers, u8 bytes, int lane, u64 value) {
  switch (bytes) {
    case 1:
      static_cast<u8*>(registers)[lane] = static_cast<u8>(value);
      break;
    case 2:
      static_cast<u16*>(registers)[lane] = static_cast<u16>(value);
      break;
    case 4:
      static_cast<u32*>(registers)[lane] = static_cast<u32>(value);
      break;
    default:
      static_cast<u64*>(registers)[lane] = value;
  }
}
// offset: bytes of the source type, its sign, bytes of the source register and of the destination register
inline void convert_integer(Warp& w, const Instruction& n, Lanes lanes) {
  const u8 bytes = n.offset & 15, from = n.offset >> 5 & 15, to = n.offset >> 9 & 15;
  const bool has_sign = n.offset >> 4 & 1;
  each(lanes, [&](int i) {
    write(w.at<u8>(n.operand[0]), to, i, extended(read(w.at<u8>(n.operand[1]), from, i), bytes, has_sign));
  });
}

// Memory. A generic address is one of this process; shared memory has offsets of its own.
enum class Space { generic, shared };

template <class Address, Space space>
unsigned char* address(Warp& w, const Instruction& n, uint32_t place, int lane, u64 bytes) {
  const u64 at = w.at<Address>(place)[lane] + static_cast<u64>(n.offset);
  if (at % bytes)
    throw Error("an address that is no multiple of the " + std::to_string(bytes) + " bytes of the access");
  if constexpr (space == Space::shared)
    return w.shared(static_cast<Address>(at), bytes);
  else
    return reinterpret_cast<unsigned char*>(at);
}
// operand: registers, then the address. target: bytes of an element; bytes of a register; sign
template <class Address, Space space>
void load(Warp& w, const Instruction& n, Lanes lanes) {
  const u8 bytes = n.target & 15, width = n.target >> 4 & 15;
  const bool has_sign = n.target >> 8;
  if (bytes == 4 && width == 4) {
    each(lanes, [&](int i) {
      const unsigned char* from = address<Address, space>(w, n, n.operand[n.count], i, 4 * n.count);
      u32 values[4];
      for (u32 j = 0; j < n.count; ++j) std::memcpy(&values[j], from + 4 * j, 4);
      for (u32 j = 0; j < n.count; ++j) w.at<u32>(n.operand[j])[i] = values[j];
    });
    return;
  }
  each(lanes, [&](int i) {
    const unsigned char* from = address<Address, space>(w, n, n.operand[n.count], i, bytes * n.count);
    u64 values[4] = {};
    for (u32 j = 0; j < n.count; ++j) std::memcpy(&values[j], from + j * bytes, bytes);
    for (u32 j = 0; j < n.count; ++j) write(w.at<u8>(n.operand[j]), width, i, extended(values[j], bytes, has_sign));
  });
}
template <class Address, Space space>
void store(Warp& w, const Instruction& n, Lanes lanes) {
  const u8 bytes = n.target & 15, width = n.target >> 4 & 15;
  each(lanes, [&](int i) {
    unsigned char* to = address<Address, space>(w, n, n.operand[n.count], i, bytes * n.count);
    for (u32 j = 0; j < n.count; ++j) {
      const u64 value = read(w.at<u8>(n.operand[j]), width, i);
      std::memcpy(to + j * bytes, &value, bytes);
    }
  });
}
template <auto f, class T, class Address, Space space>
void atomic(Warp& w, const Instruction& n, Lanes lanes) {
  each(lanes, [&](int i) {
    T* at = reinterpret_cast<T*>(address<Address, space>(w, n, n.operand[1], i, sizeof(T)));
    const T value = w.at<T>(n.operand[2])[i];
    T before;
    __atomic_load(at, &before, __ATOMIC_RELAXED);
    T after = f(before, value);
    while (!__atomic_compare_exchange(at, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      after = f(before, value);
    w.at<T>(n.operand[0])[i] = before;
  });
}

// cp.async: the bytes arrive as late as they may, when the thread waits for its group.
inline void finish_copies(Warp& w, int lane, u32 pending) {
  auto& copies = w.copies[lane];
  std::size_t done = 0;
  for (; done < copies.size() && copies[done].group + pending < w.copy_group[lane]; ++done) {
    const Copy& c = copies[done];
    std::memcpy(c.to, c.from, c.read);
    std::memset(c.to + c.read, 0, c.bytes - c.read);
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(done));
}
template <class Address>
void copy_async(Warp& w, const Instruction& n, Lanes lanes) {  // count: bytes; operand[2]: bytes to read
  each(lanes, [&](int i) {
    const u64 from = w.at<u64>(n.operand[1])[i];
    const u32 to = static_cast<u32>(w.at<Address>(n.operand[0])[i] + n.offset);
    if (from % n.count || to % n.count) throw Error("cp.async of an unaligned address");
    w.copies[i].push_back({w.shared(to, n.count), reinterpret_cast<const unsigned char*>(from + n.target), n.count,
                           std::min(w.at<u32>(n.operand[2])[i], n.count), w.copy_group[i]});
  });
}

// Collectives.
template <int mode>                                         // 0 idx, 1 bfly, 2 up, 3 down
void shuffle(Warp& w, const Instruction& n, Lanes lanes) {  // d, p, a, b, c
  u32 values[kLanes];
  std::memcpy(values, w.at<u32>(n.operand[2]), sizeof values);
  u32* d = w.at<u32>(n.operand[0]);
  u8* p = w.at<u8>(n.operand[1]);
  const u32 *b = w.at<u32>(n.operand[3]), *c = w.at<u32>(n.operand[4]);
  each(lanes, [&](int i) {
    const int by = b[i] & 31, clamp = c[i] & 31, segment = c[i] >> 8 & 31;
    const int most = (i & segment) | (clamp & ~segment), least = i & segment;
    int from = mode == 0 ? least | (by & ~segment) : mode == 1 ? i ^ by : mode == 2 ? i - by : i + by;
    const bool in = mode == 2 ? from >= most : from <= most;
    if (!in) from = i;
    if (!(lanes >> from & 1)) throw Error("shfl reads a lane that is not there");
    d[i] = values[from], p[i] = in;
  });
}
inline Lanes ballot(Warp& w, uint32_t place, Lanes lanes) {
  Lanes values = 0;
  each(lanes, [&](int i) { values |= static_cast<Lanes>(w.at<u8>(place)[i] != 0) << i; });
  return values;
}
template <int mode>  // 0 ballot, 1 all, 2 any
void vote(Warp& w, const Instruction& n, Lanes lanes) {
  const Lanes values = ballot(w, n.operand[1], lanes);
  each(lanes, [&](int i) {
    if (mode == 0)
      w.at<u32>(n.operand[0])[i] = values;
    else
      w.at<u8>(n.operand[0])[i] = mode == 1 ? values == lanes : values != 0;
  });
}
template <auto f, class T>
void reduce(Warp& w, const Instruction& n, Lanes lanes) {
  const T* a = w.at<T>(n.operand[1]);
  T sum = a[std::countr_zero(lanes)];
  each(lanes & (lanes - 1), [&](int i) { sum = f(sum, a[i]); });
  each(lanes, [&](int i) { w.at<T>(n.operand[0])[i] = sum; });
}
inline void no_operation(Warp&, const Instruction&, Lanes) {}

template <bool transposed, class Address>
void load_matrices(Warp& w, const Instruction& n, Lanes) {
  u32 out[4][kLanes];
  for (u32 m = 0; m < n.count; ++m) {
    u16 matrix[8][8];
    for (int row = 0; row < 8; ++row) {
      const u64 at = w.at<Address>(n.operand[n.count])[m * 8 + row] + static_cast<u64>(n.offset);
      if (at % 16) throw Error("ldmatrix of a row that is not at a multiple of 16 bytes");
      std::memcpy(matrix[row], w.shared(static_cast<u32>(at), 16), 16);
    }
    for (int i = 0; i < kLanes; ++i) {
      const int row = i / 4, column = i % 4 * 2;
      const u16 low = transposed ? matrix[column][row] : matrix[row][column];
      const u16 high = transposed ? matrix[column + 1][row] : matrix[row][column + 1];
      out[m][i] = static_cast<u32>(high) << 16 | low;
    }
  }
  for (u32 m = 0; m < n.count; ++m) std::memcpy(w.at<u32>(n.operand[m]), out[m], sizeof out[m]);
}

// Sums of m16n8k16, exact: of a row all columns side by side, as the compiler has vectors for them. Operand `first` is
// the first of a[4], which b[2] follow.
template <bool bf16>
struct Products {
  double a[16][16], b[16][8];
  double sum[16][8];  // set by the caller to what the products are added to

  Products(Warp& w, const Instruction& n, int first) {
    static const float* const table = f16_table();
    const auto value = [](u16 x) { return bf16 ? from_bf16(x) : table[x]; };
    for (int i = 0; i < kLanes; ++i) {
      const int row = i / 4, column = i % 4 * 2;
      for (int j = 0; j < 4; ++j) {
        const u32 x = w.at<u32>(n.operand[first + j])[i];
        double* at = &a[row + 8 * (j % 2)][column + 8 * (j / 2)];
        at[0] = value(static_cast<u16>(x)), at[1] = value(static_cast<u16>(x >> 16));
      }
      for (int j = 0; j < 2; ++j) {
        const u32 x = w.at<u32>(n.operand[first + 4 + j])[i];
        b[column + 8 * j][row] = value(static_cast<u16>(x));
        b[column + 8 * j + 1][row] = value(static_cast<u16>(x >> 16));
      }
    }
  }
  void add() {
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < 16; ++k)
        for (int column = 0; column < 8; ++column) sum[row][column] += a[row][k] * b[k][column];
  }
};
template <bool bf16>
void multiply_matrices(Warp& w, const Instruction& n, Lanes) {  // d[4], a[4], b[2], c[4]
  Products<bf16> products(w, n, 4);
  const auto each_sum = [&](const auto& f) {
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < kLanes; ++i) f(i, j, products.sum[i / 4 + 8 * (j / 2)][i % 4 * 2 + j % 2]);
  };
  each_sum([&](int i, int j, double& sum) { sum = w.at<f32>(n.operand[10 + j])[i]; });
  products.add();
  each_sum([&](int i, int j, double& sum) { w.at<f32>(n.operand[j])[i] = truncated(sum); });
}
// The same with sums in f16, to which the exact sum is rounded once.
inline void multiply_matrices_to_f16(Warp& w, const Instruction& n, Lanes) {  // d[2], a[4], b[2], c[2]
  Products<false> products(w, n, 2);
  const auto each_pair = [&](const auto& f) {
    for (int j = 0; j < 2; ++j)
      for (int i = 0; i < kLanes; ++i) f(i, j, &products.sum[i / 4 + 8 * j][i % 4 * 2]);
  };
  each_pair([&](int i, int j, double* sum) {
    const u32 c = w.at<u32>(n.operand[8 + j])[i];
    sum[0] = f16_table()[static_cast<u16>(c)], sum[1] = f16_table()[static_cast<u16>(c >> 16)];
  });
  products.add();
  each_pair([&](int i, int j, const double* sum) {
    w.at<u32>(n.operand[j])[i] = static_cast<u32>(to_f16(sum[1])) << 16 | to_f16(sum[0]);
  });
}

// The same of bytes, m16n8k32, whose sums wrap around.
template <class A, class B>
void multiply_matrices_of_bytes(Warp& w, const Instruction& n, Lanes) {
  s32 a[16][32], b[8][32];
  for (int i = 0; i < kLanes; ++i) {
    const int row = i / 4, column = i % 4 * 4;
    for (int j = 0; j < 4; ++j) {
      A numbers[4];
      std::memcpy(numbers, &w.at<u32>(n.operand[4 + j])[i], sizeof numbers);
      std::copy_n(numbers, 4, &a[row + 8 * (j % 2)][column + 16 * (j / 2)]);
    }
    for (int j = 0; j < 2; ++j) {
      B numbers[4];
      std::memcpy(numbers, &w.at<u32>(n.operand[8 + j])[i], sizeof numbers);
      std::copy_n(numbers, 4, &b[row][column + 16 * j]);
    }
  }
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < 4; ++j) {
      const int row = i / 4 + 8 * (j / 2), column = i % 4 * 2 + j % 2;
      u32 sum = w.at<u32>(n.operand[10 + j])[i];
      for (int k = 0; k < 32; ++k) sum += static_cast<u32>(a[row][k] * b[column][k]);
      w.at<u32>(n.operand[j])[i] = sum;
    }
}

// The same of e4m3. Tensor cores add up the 32 products and what they had by then in fixed point: each of the 33 terms
// is cut off 13 bits below the largest one.
inline void multiply_matrices_of_e4m3(Warp& w, const Instruction& n, Lanes) {
  f32 a[16][32], b[8][32];
  const auto read = [](u32 word, f32* to) {
    for (int c = 0; c < 4; ++c) to[c] = from_e4m3(static_cast<u8>(word >> 8 * c));
  };
  for (int i = 0; i < kLanes; ++i) {
    const int row = i / 4, column = i % 4 * 4;
    for (int j = 0; j < 4; ++j) read(w.at<u32>(n.operand[4 + j])[i], &a[row + 8 * (j % 2)][column + 16 * (j / 2)]);
    for (int j = 0; j < 2; ++j) read(w.at<u32>(n.operand[8 + j])[i], &b[row][column + 16 * j]);
  }
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < 4; ++j) {
      const int row = i / 4 + 8 * (j / 2), column = i % 4 * 2 + j % 2;
      f64 terms[33] = {w.at<f32>(n.operand[10 + j])[i]}, most = std::fabs(terms[0]), sum = 0.0;
      for (int k = 0; k < 32; ++k) terms[k + 1] = a[row][k] * b[column][k];
      bool finite = true;
      for (const f64 term : terms) most = std::max(most, std::fabs(term)), finite &= std::isfinite(term);
      const f64 unit = finite && most > 0.0 ? std::ldexp(1.0, std::ilogb(most) - 13) : 0.0;
      for (const f64 term : terms) sum += unit > 0.0 ? std::trunc(term / unit) * unit : term;
      w.at<f32>(n.operand[j])[i] = static_cast<f32>(sum);
    }
}

// Numbers of 16 bits, of which a register has two: the larger one, or all bits set where a is less than b.
inline u16 larger_f16(u16 a, u16 b) { return std::isnan(f16_table()[b]) || f16_table()[a] > f16_table()[b] ? a : b; }
inline u16 larger_bf16(u16 a, u16 b) { return std::isnan(from_bf16(b)) || from_bf16(a) > from_bf16(b) ? a : b; }
inline u16 difference_f16(u16 a, u16 b) { return to_f16(f16_table()[a] - f16_table()[b]); }
inline u16 product_f16(u16 a, u16 b) { return to_f16(f16_table()[a] * f16_table()[b]); }
inline u16 less_f16(u16 a, u16 b) { return f16_table()[a] < f16_table()[b] ? 0xffff : 0; }
template <u16 (*f)(u16, u16)>
u32 of_halves(u32 a, u32 b) {
  return static_cast<u32>(f(static_cast<u16>(a >> 16), static_cast<u16>(b >> 16))) << 16 |
         f(static_cast<u16>(a), static_cast<u16>(b));
}

inline void permute_bytes(Warp& w, const Instruction& n, Lanes lanes) {
  const u32 *a = w.at<u32>(n.operand[1]), *b = w.at<u32>(n.operand[2]), *c = w.at<u32>(n.operand[3]);
  u32* d = w.at<u32>(n.operand[0]);
  each(lanes, [&](int i) {
    const u64 bytes = static_cast<u64>(b[i]) << 32 | a[i];
    u32 out = 0;
    for (int j = 0; j < 4; ++j) {
      const u32 which = c[i] >> 4 * j & 15;
      u8 byte = static_cast<u8>(bytes >> 8 * (which & 7));
      if (which & 8) byte = byte & 0x80 ? 0xff : 0;
      out |= static_cast<u32>(byte) << 8 * j;
    }
    d[i] = out;
  });
}
template <class T>
void insert_bits(Warp& w, const Instruction& n, Lanes lanes) {  // d, a, b, at, length
  constexpr u32 kBits = 8 * sizeof(T);
  each(lanes, [&](int i) {
    const u32 at = w.at<u32>(n.operand[3])[i] & 255, length = w.at<u32>(n.operand[4])[i] & 255;
    const T ones = length < kBits ? (T{1} << length) - 1 : ~T{0};
    const T field = at < kBits ? ones << at : 0, a = at < kBits ? w.at<T>(n.operand[1])[i] << at : 0;
    w.at<T>(n.operand[0])[i] = (a & field) | (w.at<T>(n.operand[2])[i] & ~field);
  });
}
inline void split_32(Warp& w, const Instruction& n, Lanes lanes) {
  each(lanes, [&](int i) {
    const u32 a = w.at<u32>(n.operand[2])[i];
    w.at<u16>(n.operand[0])[i] = static_cast<u16>(a), w.at<u16>(n.operand[1])[i] = static_cast<u16>(a >> 16);
  });
}
inline void split_64(Warp& w, const Instruction& n, Lanes lanes) {
  each(lanes, [&](int i) {
    const u64 a = w.at<u64>(n.operand[2])[i];
    w.at<u32>(n.operand[0])[i] = static_cast<u32>(a), w.at<u32>(n.operand[1])[i] = static_cast<u32>(a >> 32);
  });
}

template <int axis, int what>  // 0 tid, 1 ntid, 2 ctaid, 3 nctaid, 4 laneid
void special(Warp& w, const Instruction& n, Lanes lanes) {
  each(lanes, [&](int i) {
    w.at<u32>(n.operand[0])[i] = what == 0   ? w.thread[i][axis]
                                 : what == 1 ? w.block->threads[axis]
                                 : what == 2 ? w.block->index[axis]
                                 : what == 3 ? w.block->grid[axis]
                                             : static_cast<u32>(i);
  });
}

inline void shared_to_generic(Warp& w, const Instruction& n, Lanes lanes) {
  each(lanes, [&](int i) {
    w.at<u64>(n.operand[0])[i] = w.at<u64>(n.operand[1])[i] + reinterpret_cast<u64>(w.block->shared.front().bytes);
  });
}
inline void generic_to_shared(Warp& w, const Instruction& n, Lanes lanes) {
  each(lanes, [&](int i) {
    w.at<u64>(n.operand[0])[i] = w.at<u64>(n.operand[1])[i] - reinterpret_cast<u64>(w.block->shared.front().bytes);
  });
}

inline void call(Warp& w, const Instruction& n, Lanes lanes) {
  Function& callee = w.block->module->find(n.callee);
  Frame* const caller = w.frame;
  Frame frame;
  enter(frame, callee, lanes, 0, 0);
  // The callee's parameters are where the caller put them, each by itself.
  for (const Constant& c : callee.constants) {
    if (c.kind != Constant::parameter) continue;
    std::size_t which = 0;
    while (which + 1 < callee.parameters.size() && callee.parameters[which + 1].offset <= c.value) ++which;
    const u64* from = w.at<u64>(n.arguments[which]);
    u64* to = reinterpret_cast<u64*>(frame.registers.data() + c.place);
    each(lanes, [&](int i) { to[i] = from[i] + c.value - callee.parameters[which].offset; });
  }
  if (!run(w, frame)) throw Error("a barrier in a function that is called");
  w.frame = caller, w.registers = caller->registers.data();
}

}  // namespace emulator
