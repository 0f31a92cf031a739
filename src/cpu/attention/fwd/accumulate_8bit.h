// o = alpha o + P V for 8-bit P: the products of a key tile are integers with a scale for each row, formed apart and
// then added to o.
#pragma once
#include "cpu/attention/fwd/rows.h"

namespace octet::cpu::OCTET_ISA {

constexpr int64_t kStripColumns = 32;  // of a product, at a time

// The product P V of `tiles` key tiles that one step adds to o. A tile of v is v_stride words after the one before.
struct Product8Bit {
  const Word* p;
  int64_t p_stride;  // words of a row
  const Word* v;
  int64_t v_stride, v_words;
  int64_t tiles, columns;
  const int32_t* v_zero;  // [tile][kKeys]; null: no zero points
};

// The sums of P times the zero points of v, for each row and tile: what the product with codes has too much.
template <class Pv>
inline void zero_products(const Product8Bit& x, int64_t rows, typename Pv::Sum (*out)[kStepTiles]) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t tile = 0; tile < x.tiles; ++tile) {
      const auto* p = reinterpret_cast<const typename Pv::Element*>(x.p + i * x.p_stride + tile * x.v_words);
      typename Pv::Sum sum{};
      for (int64_t j = 0; j < kKeys; ++j)
        sum += static_cast<typename Pv::Sum>(p[j]) * static_cast<typename Pv::Sum>(x.v_zero[tile * kKeys + j]);
      out[i][tile] = sum;
    }
}

// Products of `tiles` tiles with the same rows of o, [tile][tile_stride] with rows `stride` apart.
template <class Sum>
struct Products {
  const Sum* at;
  int64_t tile_stride, stride, tiles;
};

// Rows of o += rows of products, minus `zeros` where there are some, times their scales.
template <bool has_zeros, class Sum>
OCTET_INLINE void add_products_of(const Products<Sum>& x, int64_t rows, int64_t n, const float (*scales)[kStepTiles],
                                  const Sum (*zeros)[kStepTiles], float* o, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < n; c += kLanes) {
      float* own = o + i * columns + c;
      auto sum = load(own);
      for (int64_t tile = 0; tile < x.tiles; ++tile) {
        auto product = load(x.at + tile * x.tile_stride + i * x.stride + c);
        if constexpr (has_zeros) product -= zeros[i][tile];
        sum += to_float(product) * scales[i][tile];
      }
      store(own, sum);
    }
}
template <class Sum>
OCTET_INLINE void add_products(const Products<Sum>& x, int64_t rows, int64_t n, const float (*scales)[kStepTiles],
                               const Sum (*zeros)[kStepTiles], float* o, int64_t columns) {
  if (zeros)
    add_products_of<true>(x, rows, n, scales, zeros, o, columns);
  else
    add_products_of<false>(x, rows, n, scales, zeros, o, columns);
}

#ifdef __AMX_TILE__

// 16 rows and 16 or 32 columns of the product of a tile of P and v. Other tile numbers for odd tiles, so that the next
// product begins while this one is stored.
template <bool odd, bool two>
inline void tile_product(const Word* p, int64_t p_stride, const Word* v, int64_t columns, int32_t* product) {
  constexpr int64_t kBytes = kStripColumns * 4;
  if constexpr (odd) {
    _tile_zero(2);
    _tile_loadd(5, p, p_stride * 4);
    _tile_loadd(7, v, columns * 4);
    _tile_dpbusd(2, 5, 7);
    if constexpr (two) {
      _tile_zero(3);
      _tile_loadd(7, v + 16, columns * 4);
      _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(2, product, kBytes);
    if constexpr (two) _tile_stored(3, product + 16, kBytes);
  } else {
    _tile_zero(0);
    _tile_loadd(4, p, p_stride * 4);
    _tile_loadd(6, v, columns * 4);
    _tile_dpbusd(0, 4, 6);
    if constexpr (two) {
      _tile_zero(1);
      _tile_loadd(6, v + 16, columns * 4);
      _tile_dpbusd(1, 4, 6);
    }
    _tile_stored(0, product, kBytes);
    if constexpr (two) _tile_stored(1, product + 16, kBytes);
  }
}

template <bool two>
inline void accumulate_block(const Product8Bit& x, const Word* p, const Word* v, const float (*scales)[kStepTiles],
                             const int32_t (*zeros)[kStepTiles], float* o) {
  constexpr int64_t kProduct = 16 * kStripColumns, n = two ? 32 : 16;
  alignas(64) int32_t products[kStepTiles * kProduct];
  for (int64_t tile = 0; tile < x.tiles; ++tile)
    (tile % 2 ? tile_product<true, two> : tile_product<false, two>)(p + tile * x.v_words, x.p_stride,
                                                                    v + tile * x.v_stride, x.columns,
                                                                    products + tile * kProduct);
  // A constant number of tiles, mostly: the loop is unrolled.
  if (x.tiles == kStepTiles)
    add_products<int32_t>({products, kProduct, kStripColumns, kStepTiles}, 16, n, scales, zeros, o, x.columns);
  else
    add_products<int32_t>({products, kProduct, kStripColumns, x.tiles}, 16, n, scales, zeros, o, x.columns);
}

#endif

// `strip`: [kStepTiles][rows][kStripColumns], of engines without tiles.
template <class Pv>
inline void accumulate_8bit(const Product8Bit& x, int64_t rows, const float* alpha, const float (*scales)[kStepTiles],
                            typename Pv::Sum* strip, float* o) {
  alignas(64) typename Pv::Sum found[kMaxBlockRows][kStepTiles];
  const auto* const zeros = x.v_zero ? found : nullptr;
  if (zeros) zero_products<Pv>(x, rows, found);
  for (int64_t i = 0; i < rows; ++i)
    if (alpha[i] != 1.f) scale_row(o + i * x.columns, alpha[i], x.columns);
#ifdef __AMX_TILE__
  if constexpr (Pv::kTiles) {
    compiler_barrier();
    for (int64_t c = 0; c < x.columns; c += 32)
      for (int64_t i = 0; i < rows; i += 16)
        (c + 16 < x.columns ? accumulate_block<true> : accumulate_block<false>)(x, x.p + i * x.p_stride, x.v + c,
                                                                                scales + i, zeros ? zeros + i : nullptr,
                                                                                o + i * x.columns + c);
    return;
  }
#endif
  for (int64_t c = 0; c < x.columns; c += kStripColumns) {
    const int64_t n = std::min(x.columns - c, kStripColumns), tile_stride = rows * kStripColumns;
    for (int64_t tile = 0; tile < x.tiles; ++tile)
      matmul<Pv, false>(x.p + tile * x.v_words, {x.p_stride, 1}, x.v + tile * x.v_stride + c, x.columns,
                        strip + tile * tile_stride, kStripColumns, rows, n, x.v_words);
    add_products<typename Pv::Sum>({strip, tile_stride, kStripColumns, x.tiles}, rows, n, scales, zeros, o + c,
                                   x.columns);
  }
}

}  // namespace octet::cpu::OCTET_ISA
