// Vectors of L floats in the compiler's own form (GCC and Clang). Intrinsics stand only where a load widens: compilers
// take a widening conversion of a whole vector apart into single numbers.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int WIDEST = 16;
#elif defined(__AVX2__)
constexpr int WIDEST = 8;
#else
constexpr int WIDEST = 4;
#endif

template <int L> struct Types {
  typedef float Float __attribute__((vector_size(4 * L)));
  typedef int32_t Int __attribute__((vector_size(4 * L)));
};
template <int L> using Float = typename Types<L>::Float;
template <int L> using Int = typename Types<L>::Int;

template <class V> inline V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}
template <class V> inline void store(void* to, V v) { memcpy(to, &v, sizeof v); }
template <class To, class From> inline To bits(From v) { return load<To>(&v); }
template <int L> inline Float<L> floats(Int<L> x) { return __builtin_convertvector(x, Float<L>); }
template <int L> inline Float<L> splat(float x) { return x - Float<L>{}; }
template <int L> inline Float<L> select(Int<L> condition, Float<L> yes, Float<L> no) {
  return bits<Float<L>>((condition & bits<Int<L>>(yes)) | (~condition & bits<Int<L>>(no)));
}
template <int L> inline Float<L> maximum(Float<L> a, Float<L> b) { return a > b ? a : b; }

// L bytes, or L 16-bit numbers, each into a 32-bit lane.
template <int L, class Narrow> inline Int<L> widen(const void* from) {
#if defined(__AVX512F__)
  if constexpr (L == 16 && sizeof(Narrow) == 1) return (Int<16>)_mm512_cvtepu8_epi32(load<__m128i>(from));
  if constexpr (L == 16 && sizeof(Narrow) == 2) return (Int<16>)_mm512_cvtepu16_epi32(load<__m256i>(from));
#endif
#if defined(__AVX2__)
  if constexpr (L == 8 && sizeof(Narrow) == 1)
    return (Int<8>)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
  if constexpr (L == 8 && sizeof(Narrow) == 2) return (Int<8>)_mm256_cvtepu16_epi32(load<__m128i>(from));
#endif
  Narrow narrow[L];
  memcpy(narrow, from, sizeof narrow);
  Int<L> wide;
  for (int i = 0; i < L; i++) wide[i] = narrow[i];
  return wide;
}

template <int L> inline Float<L> load_bfloat16(const void* from) {
  return bits<Float<L>>(widen<L, uint16_t>(from) << 16);
}

template <int L> inline Float<L> load_float16(const void* from) {
#if defined(__AVX512F__)
  if constexpr (L == 16) return (Float<16>)_mm512_cvtph_ps(load<__m256i>(from));
#endif
#if defined(__F16C__)
  if constexpr (L == 8) return (Float<8>)_mm256_cvtph_ps(load<__m128i>(from));
  if constexpr (L == 4) return (Float<4>)_mm_cvtph_ps(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
#endif
  const Int<L> half = widen<L, uint16_t>(from), magnitude = (half & 0x7fff) << 13;
  const Int<L> normal = magnitude + (112 << 23);  // the exponent's bias is 15 there and 127 here
  const Float<L> tiny = bits<Float<L>>(magnitude + (113 << 23)) - bits<float>(113 << 23);
  const Float<L> finite = select<L>(magnitude < (1 << 23), tiny, bits<Float<L>>(normal));
  const Float<L> special = bits<Float<L>>(normal + (112 << 23));  // infinities and NaN
  const Float<L> value = select<L>(magnitude >= (31 << 23), special, finite);
  return bits<Float<L>>(bits<Int<L>>(value) | (half & 0x8000) << 16);
}

// e4m3: a bias of 7, no infinity, and one NaN, which has all bits set.
template <int L> inline Float<L> load_float8(const void* from) {
  const Int<L> byte = widen<L, uint8_t>(from), magnitude = (byte & 0x7f) << 20;
  const Float<L> tiny = bits<Float<L>>(magnitude + (121 << 23)) - bits<float>(121 << 23);
  const Float<L> finite = select<L>(magnitude < (1 << 23), tiny, bits<Float<L>>(magnitude + (120 << 23)));
  const Int<L> nan = (byte & 0x7f) == 0x7f;
  return bits<Float<L>>(bits<Int<L>>(finite) | (byte & 0x80) << 24 | (nan & 0x7fc00000));
}

// Entries of a table of 16 floats.
template <int L> inline Float<L> lookup(const float* table, Int<L> at) {
#if defined(__AVX512F__)
  if constexpr (L == 16) return (Float<16>)_mm512_permutexvar_ps((__m512i)at, load<__m512>(table));
#endif
#if defined(__AVX2__)
  if constexpr (L == 8) return (Float<8>)_mm256_i32gather_ps(table, (__m256i)at, 4);
#endif
  Float<L> found;
  for (int i = 0; i < L; i++) found[i] = table[at[i]];
  return found;
}

template <int L, class Both> inline Float<4> fold(Float<L> x, Both both) {
  if constexpr (L == 4) {
    return x;
  } else {
    Float<L / 2> half[2];
    memcpy(half, &x, sizeof x);
    return fold<L / 2>(both(half[0], half[1]), both);
  }
}
template <int L> inline float total(Float<L> x) {
  const Float<4> four = fold<L>(x, [](auto a, auto b) { return a + b; });
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Within every four lanes the lanes A, B, C, D of a (0 .. 3) and b (4 .. 7).
template <int L, int A, int B, int C, int D> inline constexpr int lane(int i) {
  constexpr int from[4] = {A, B, C, D};
  return i / 4 * 4 + from[i % 4] % 4 + (from[i % 4] >= 4 ? L : 0);
}
template <int L, int A, int B, int C, int D, int... I>
inline Float<L> shuffle(Float<L> a, Float<L> b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, lane<L, A, B, C, D>(I)...);
#else
  return __builtin_shuffle(a, b, Int<L>{lane<L, A, B, C, D>(I)...});
#endif
}
template <int L, int A, int B, int C, int D> inline Float<L> shuffle(Float<L> a, Float<L> b) {
  return shuffle<L, A, B, C, D>(a, b, std::make_integer_sequence<int, L>());
}

// What an operation makes of all lanes, of each of four vectors, side by side.
template <int L, class Both> inline Float<4> four_folded(const Float<L>* x, Both both) {
  const Float<L> ab = both(shuffle<L, 0, 4, 1, 5>(x[0], x[1]), shuffle<L, 2, 6, 3, 7>(x[0], x[1]));
  const Float<L> cd = both(shuffle<L, 0, 4, 1, 5>(x[2], x[3]), shuffle<L, 2, 6, 3, 7>(x[2], x[3]));
  return fold<L>(both(shuffle<L, 0, 1, 4, 5>(ab, cd), shuffle<L, 2, 3, 6, 7>(ab, cd)), both);
}
template <int L> inline Float<4> four_sums(const Float<L>* x) {
  return four_folded<L>(x, [](auto a, auto b) { return a + b; });
}
template <int L> inline Float<4> four_maxima(const Float<L>* x) {
  return four_folded<L>(x, [](auto a, auto b) { return a > b ? a : b; });
}

// exp of numbers that are at most 0, and exactly 0 below float32's range (polynomial of the Cephes library, 2 ulp).
template <int L> inline Float<L> exponential(Float<L> x) {
  const Float<L> clamped = maximum<L>(x, splat<L>(-87.0f)), magic = splat<L>(12582912.0f);  // 1.5 * 2^23: rounds
  const Float<L> shifted = clamped * 1.44269504f + magic, n = shifted - magic;
  const Float<L> r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  Float<L> p = splat<L>(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = p * r + c;
  p = p * (r * r) + r + 1.0f;
  const Int<L> exponent = (bits<Int<L>>(shifted) - bits<Int<L>>(magic) + 127) << 23;
  return select<L>(x < -87.0f, Float<L>{}, p * bits<Float<L>>(exponent));
}

// tanh; near 0 by Cephes' polynomial, for there the quotient cancels.
template <int L> inline Float<L> hyperbolic_tangent(Float<L> x) {
  const Float<L> size = bits<Float<L>>(bits<Int<L>>(x) & 0x7fffffff), z = x * x;
  Float<L> p = splat<L>(-5.70498872745e-3f);
  for (float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) p = p * z + c;
  const Float<L> e = exponential<L>(-2.0f * size), far = (1.0f - e) / (1.0f + e);
  return select<L>(size < 0.625f, x + x * z * p, select<L>(x < 0.0f, -far, far));
}

}  // namespace
