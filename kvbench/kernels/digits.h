// Sums of rows of codes by integer products, for CPUs that multiply bytes four at a time (AVX-512 VNNI).
//
//     sum over rows r of factor[r] * (scale[r] * code[r] + minimum[r])  =  unit * sum of whole[r] * code[r] + constant
//
// where whole[r] is factor[r] * scale[r] / unit, rounded to one of 2^24 numbers: no coarser than float32, whose sums
// round on top. Codes are multiplied by each of the three digits (base 256) of `whole`: three quarters of the
// multiplications that floats take, and codes stay bytes.

#pragma once

#include "loops.h"

namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
constexpr bool HAS_DIGITS = true;
#else
constexpr bool HAS_DIGITS = false;
#endif

// Whether codes of a format are summed by integer products; units are those of Unit<FORMAT, 16>, two vectors each.
template <int FORMAT, int L> constexpr bool by_digits() {
  return HAS_DIGITS && L == 16 && (FORMAT == CODES8 || FORMAT == CODES4 || FORMAT == CODES2);
}

// Like score_block, for queries and pairs that are not folded yet; and like add_rows.
template <int FORMAT, int M>
void score_by_digits(const Grid& grid, const Tile& channels, const Pairs& pairs, const float* query, float* scores);
template <int FORMAT, int M>
void add_by_digits(const Grid& grid, const Tile& tile, const Pairs& pairs, const float* weight, float* output);

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

#define UNROLL _Pragma("GCC unroll 16")  // without, GCC leaves arrays of sums in memory
constexpr int DIGITS = 3;

// What multiplies the rows in up to MOST_QUERIES sums: of every four rows digits 0, 1 and 2, and four idle bytes.
struct Digits {
  alignas(64) uint8_t at[MOST_QUERIES][4 * MOST_COLUMNS + 320];  // rows 4096 bytes apart would wait for one another
  float unit[4], constant[4];
};

// The instruction multiplies unsigned bytes by signed bytes. Factors that are never negative, such as weights, get
// digits 0 .. 255, and codes are signed: code - 2^(bits - 1), which is nearer to 0 and so has less error.
template <int FORMAT, bool SIGNED> constexpr int CENTRE = SIGNED ? 0 : 1 << (code_bits(FORMAT) - 1);

template <int FORMAT, bool SIGNED, int M>
void to_digits(const float* factor, const float* scale, const float* minimum, int n, Digits& digits) {
  const __m512 sign = _mm512_set1_ps(-0.0f);
  Float<16> largest[4] = {}, constant[4] = {};
  for (int i = 0; i < n; i += 16) {
    const __mmask16 some = __mmask16(0xffff >> std::max(0, 16 - (n - i)));
    const Float<16> s = (Float<16>)_mm512_maskz_loadu_ps(some, scale + i);
    const Float<16> low = (Float<16>)_mm512_maskz_loadu_ps(some, minimum + i) + s * float(CENTRE<FORMAT, SIGNED>);
    UNROLL for (int m = 0; m < M; m++) {
      const Float<16> f = (Float<16>)_mm512_maskz_loadu_ps(some, factor + m * STRIDE + i), x = f * s;
      store(digits.at[m] + 4 * i, x);
      largest[m] = maximum<16>(largest[m], SIGNED ? (Float<16>)_mm512_andnot_ps(sign, (__m512)x) : x);
      constant[m] += f * low;
    }
  }
  constexpr float most = SIGNED ? 8355000.0f : 16777000.0f;  // what three digits hold, and some room for roundings
  const Float<4> top = maximum<4>(four_maxima<16>(largest), splat<4>(1e-30f));
  store(digits.unit, top * (1 / most)), store(digits.constant, four_sums<16>(constant));
  float inverse[4];
  store(inverse, most / top);
  // Digits of -128 .. 127: those of a number that is larger by 128 in each place, less 128.
  const Int<16> moved = Int<16>{} + (SIGNED ? 0x808080 : 0);
  const __m128i of_four = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i by_digit = _mm512_broadcast_i32x4(of_four);
  for (int i = 0; i < n; i += 16)
    UNROLL for (int m = 0; m < M; m++) {
      const Float<16> x = load<Float<16>>(digits.at[m] + 4 * i) * inverse[m];
      const Int<16> whole = ((Int<16>)_mm512_cvtps_epi32((__m512)x) + moved) ^ moved;
      store(digits.at[m] + 4 * i, _mm512_shuffle_epi8((__m512i)whole, by_digit));
    }
}

// The two vectors of a unit of four rows: the rows' codes of a column are the four bytes of a lane.
template <int FORMAT>
inline void four_rows(const uint8_t* row, int64_t one, int64_t two, int64_t three, __m512i (&codes)[2]) {
  struct Order { uint8_t from[64]; };
  alignas(64) static constexpr Order order = [](int bytes) {
    Order by_column{};
    for (int i = 0; i < 64; i++) by_column.from[i] = uint8_t(i % 4 * bytes + i / 4 % bytes);
    return by_column;
  }(FORMAT == CODES2 ? 8 : 16);
  const __m512i from = _mm512_load_si512(order.from);
  if constexpr (FORMAT == CODES2) {
    const auto eight = [&](int64_t at) { return load<int64_t>(row + at); };
    const __m256i four = _mm256_setr_epi64x(eight(0), eight(one), eight(two), eight(three));
    const __m512i both = _mm512_permutexvar_epi8(from, _mm512_castsi256_si512(four)), mask = _mm512_set1_epi8(3);
    const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
    codes[0] = _mm512_srlv_epi32(both, shift) & mask;
    codes[1] = _mm512_srlv_epi32(_mm512_srli_epi32(both, 4), shift) & mask;
  } else {
    const auto sixteen = [&](const uint8_t* at) {
      __m512i x = _mm512_castsi128_si512(load<__m128i>(at));
      x = _mm512_inserti32x4(x, load<__m128i>(at + one), 1);
      x = _mm512_inserti32x4(x, load<__m128i>(at + two), 2);
      return _mm512_permutexvar_epi8(from, _mm512_inserti32x4(x, load<__m128i>(at + three), 3));
    };
    codes[0] = sixteen(row);
    if constexpr (FORMAT == CODES8) codes[1] = sixteen(row + 16);
    if constexpr (FORMAT == CODES4) {
      codes[1] = _mm512_srli_epi32(codes[0], 4) & _mm512_set1_epi8(15);
      codes[0] &= _mm512_set1_epi8(15);
    }
  }
}

// body(m, v, sums): vector v of a unit, summed over the rows of a tile.
template <int FORMAT, bool SIGNED, int M, class Body>
inline void sum_unit(const Tile& tile, int byte, const Digits& digits, const uint8_t*& ahead, Body body) {
  Int<16> sum[M][2][DIGITS] = {};
  const uint8_t* row = tile.rows + byte;
  const int64_t stride = tile.stride;
  const auto add = [&](int t, int64_t one, int64_t two, int64_t three) __attribute__((always_inline)) {
    __m512i codes[2];
    four_rows<FORMAT>(row, one, two, three, codes);
    if constexpr (!SIGNED)
      for (auto& c : codes) c = _mm512_sub_epi8(c, _mm512_set1_epi8(char(CENTRE<FORMAT, SIGNED>)));
    fetch_ahead<4 * Unit<FORMAT, 16>::BYTES>(ahead);
    UNROLL for (int m = 0; m < M; m++) {
      UNROLL for (int d = 0; d < DIGITS; d++) {
        __m512i four = _mm512_set1_epi32(load<int32_t>(digits.at[m] + 4 * t + 4 * d));
        asm("" : "+v"(four));  // one load for two products
        UNROLL for (int v = 0; v < 2; v++) {
          const __m512i so_far = (__m512i)sum[m][v][d];  // the second operand has the sign
          sum[m][v][d] = (Int<16>)(SIGNED ? _mm512_dpbusd_epi32(so_far, codes[v], four)
                                          : _mm512_dpbusd_epi32(so_far, four, codes[v]));
        }
      }
    }
  };
  int t = 0;
  for (; t + 4 <= tile.count; t += 4, row += 4 * stride) add(t, stride, 2 * stride, 3 * stride);
  const int left = tile.count - t;  // the digits of rows past the last are 0
  if (left) add(t, left > 1 ? stride : 0, left > 2 ? 2 * stride : 0, 0);
  const Digits* same = &digits;
  asm("" : "+r"(same));  // or GCC would keep units and constants in registers that the loop needs
  UNROLL for (int m = 0; m < M; m++) {
    UNROLL for (int v = 0; v < 2; v++) {
      const Float<16> high = floats<16>(sum[m][v][2]) * 65536.0f + floats<16>(sum[m][v][1]) * 256.0f;
      body(m, v, (high + floats<16>(sum[m][v][0])) * same->unit[m] + same->constant[m]);
    }
  }
}

template <int FORMAT, int M>
void score_by_digits(const Grid& grid, const Tile& channels, const Pairs& pairs, const float* query, float* scores) {
  Digits digits;
  to_digits<FORMAT, true, M>(query, pairs.scale, pairs.minimum, channels.count, digits);
  const uint8_t* ahead = channels.rows + channels.ahead;
  for (int u = 0; u < grid.units; u++)
    sum_unit<FORMAT, true, M>(channels, grid.byte[u], digits, ahead, [&](int m, int v, Float<16> sum) {
      store(scores + m * STRIDE + grid.column[u] + v * grid.step, sum);
    });
}

// The pairs of a tile, [n, groups], to [groups, MOST_TILE]; writes up to 15 more of each group.
template <int GROUPS> void transpose_pairs(const float* from, int n, float* to) {
  Int<16> even, odd;
  for (int i = 0; i < 16; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
  for (int t = 0; t < n; t += 16) {
    __m512 x[GROUPS], y[GROUPS];
    for (int g = 0; g < GROUPS; g++) x[g] = _mm512_loadu_ps(from + t * GROUPS + 16 * g);
    for (int done = 1; done < GROUPS; done *= 2) {
      for (int g = 0; g < GROUPS; g += 2) {
        y[g / 2] = _mm512_permutex2var_ps(x[g], (__m512i)even, x[g + 1]);
        y[(g + GROUPS) / 2] = _mm512_permutex2var_ps(x[g], (__m512i)odd, x[g + 1]);
      }
      std::copy(y, y + GROUPS, x);
    }
    for (int g = 0; g < GROUPS; g++) _mm512_storeu_ps(to + g * MOST_TILE + t, x[g]);
  }
}
void transpose_pairs(const float* from, int n, int groups, float* to) {
  switch (groups) {
    case 1: return transpose_pairs<1>(from, n, to);
    case 2: return transpose_pairs<2>(from, n, to);
    case 4: return transpose_pairs<4>(from, n, to);
  }
  for (int g = 0; g < groups; g++)
    for (int t = 0; t < n; t++) to[g * MOST_TILE + t] = from[t * groups + g];
}

template <int FORMAT, int M>
void add_by_digits(const Grid& grid, const Tile& tile, const Pairs& pairs, const float* weight, float* output) {
  Digits digits;
  float scale[MOST_COLUMNS / 32 * MOST_TILE], minimum[MOST_COLUMNS / 32 * MOST_TILE];
  transpose_pairs(pairs.scale, tile.count, tile.groups, scale);
  transpose_pairs(pairs.minimum, tile.count, tile.groups, minimum);
  const uint8_t* ahead = tile.rows + tile.ahead;
  for (int u = 0; u < grid.units; u++) {
    const int group = grid.group[u];
    if (!u || group != grid.group[u - 1])
      to_digits<FORMAT, false, M>(weight, scale + group * MOST_TILE, minimum + group * MOST_TILE, tile.count, digits);
    sum_unit<FORMAT, false, M>(tile, grid.byte[u], digits, ahead, [&](int m, int v, Float<16> sum) {
      float* to = output + m * STRIDE + grid.column[u] + v * grid.step;
      store(to, load<Float<16>>(to) + sum);
    });
  }
}

#endif
}  // namespace
