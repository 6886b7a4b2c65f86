// The inner loops of decode attention: scores of rows, scores of blocks, sums of weighted rows. One template each over
// the format in memory, the vector length and the number of queries served by what is decoded into registers.

#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace {

// Codes are the numbers themselves, or with LEVELS indices into a codebook. Values below 16 are the bits of a code.
enum Format : int64_t {
  FLOAT32 = 32, FLOAT8 = 18, BFLOAT16 = 17, FLOAT16 = 16, CODES8 = 8, CODES4 = 4, CODES3 = 3, CODES2 = 2,
  LEVELS = 64, LEVELS4 = LEVELS + 4, LEVELS3 = LEVELS + 3
};
constexpr bool has_codes(int64_t format) { return format < 16 || format >= LEVELS; }
constexpr int code_bits(int64_t format) { return format & 15; }
constexpr int float_bytes(int64_t format) { return format == FLOAT32 ? 4 : format == FLOAT8 ? 1 : 2; }
constexpr int MOST_LEVELS = 16;

constexpr int MOST_TILE = 128;       // rows that are decoded together; fewer where rows are long
constexpr int64_t TILE_BYTES = 32 << 10;
constexpr int MOST_COLUMNS = 512;    // of a head; cpu_parts.py refuses larger ones
constexpr int SMALLEST_GROUP = 8;
constexpr int MOST_UNITS = MOST_COLUMNS / 8;
constexpr int64_t STRIDE = 512 + 16;  // between rows in all scratch memory: a constant saves registers in the loops
#if defined(__AVX512VL__) || defined(__aarch64__)
constexpr int MOST_QUERIES = 4;  // with four rows each 16 sums, which 32 registers hold
#else
constexpr int MOST_QUERIES = 3;
#endif

// A unit is decoded in one step: VECTORS vectors from BYTES bytes. Codes stay numbers 0 .. 2^bits - 1, or are replaced by
// their entry in `levels`.
template <int FORMAT, int L> struct Unit {
  static constexpr bool CODES = has_codes(FORMAT), LOOKUP = FORMAT >= LEVELS;
  static constexpr int BITS = CODES ? code_bits(FORMAT) : 0;
  static constexpr bool TWICE = BITS == 2 && L == 16;  // the 8 bytes of a group of 32 fill both vector halves
  static constexpr int VECTORS = BITS == 3 ? 32 / L : BITS == 2 && !TWICE ? 4 : 2;
  static constexpr int BYTES = BITS == 3 ? 12 : TWICE ? 8 : CODES ? (BITS == 8 ? 2 * L : L)
                                                          : 2 * L * float_bytes(FORMAT);

  static inline void decode(const uint8_t* at, Float<L>* x, [[maybe_unused]] const float* levels) {
    for (int v = 0; v < VECTORS; v++) {
      if constexpr (FORMAT == FLOAT32) x[v] = load<Float<L>>(at + 4 * L * v);
      if constexpr (FORMAT == BFLOAT16) x[v] = load_bfloat16<L>(at + 2 * L * v);
      if constexpr (FORMAT == FLOAT16) x[v] = load_float16<L>(at + 2 * L * v);
      if constexpr (FORMAT == FLOAT8) x[v] = load_float8<L>(at + L * v);
      if constexpr (CODES) {
        const Int<L> code = codes(at, v);
        if constexpr (LOOKUP) x[v] = lookup<L>(levels, code);
        else x[v] = floats<L>(code);
      }
    }
  }

  static inline Int<L> codes(const uint8_t* at, int v) {
    if constexpr (BITS == 8) return widen<L, uint8_t>(at + L * v);
    if constexpr (BITS == 4) {
      const Int<L> word = widen<L, uint8_t>(at);
      return v ? word >> 4 : word & 15;
    }
    if constexpr (BITS == 2) return two_bits(at, v, 4);
    if constexpr (BITS == 3) return two_bits(at, v, 32 / L) | high_bits(at + 8, v) << 2;
    return Int<L>{};
  }

  // Vector v of `vectors` from bytes that hold four codes each, of columns as far apart as there are bytes.
  static inline Int<L> two_bits(const uint8_t* at, int v, [[maybe_unused]] int vectors) {
    if constexpr (L == 16) {
      const uint64_t both[2] = {load<uint64_t>(at), load<uint64_t>(at)};
      const Int<L> shift = Int<L>{0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2} + 4 * v;
      return (widen<L, uint8_t>(both) >> shift) & 3;
    } else {
      const int halves = vectors / 4;  // vectors that one shift of all bytes fills
      return (widen<L, uint8_t>(at + v % halves * L) >> (v / halves * 2)) & 3;
    }
  }

  // The third bits of a group of 32: four bytes of eight.
  static inline Int<L> high_bits(const uint8_t* at, int v) {
    const uint32_t four[4] = {load<uint32_t>(at), load<uint32_t>(at), load<uint32_t>(at), load<uint32_t>(at)};
    Int<L> shift;
    for (int i = 0; i < L; i++) shift[i] = (v * L + i) / 4;
    return (widen<L, uint8_t>(four) >> shift) & 1;
  }
};

// Where the units of a row lie. A unit's vectors are `step` columns apart: a byte holds codes of distant columns.
struct Grid {
  int lanes = 0, units = 0, step = 0;  // lanes is 0 where no vector length fits
  int byte[MOST_UNITS], column[MOST_UNITS], group[MOST_UNITS];

  // columns: of the row. packed: columns whose codes are packed together. paired: columns that share a scale.
  Grid(int64_t format, int columns, int packed, int paired) {
    const bool codes = has_codes(format);
    const int bits = codes ? code_bits(format) : 8, width = codes ? 1 : float_bytes(format);
    const int span = codes ? packed * bits / 8 : columns;  // bytes of codes, or floats, that are packed together
    for (int L = WIDEST; L >= 4 && !lanes; L /= 2) {
      const bool whole = codes && (bits == 3 || (bits == 2 && L == 16));  // a unit is all that is packed together
      const int unit = whole ? 4 * bits : codes && bits != 8 ? L : 2 * L, per_group = span / unit;
      if (span % unit || (whole && span != unit) || columns / (unit * 8 / bits) > MOST_UNITS) continue;
      lanes = L, units = columns / (unit * 8 / bits), step = bits < 8 && !whole ? span : L;
      for (int u = 0; u < units; u++) {
        const int at = u % per_group * unit, block = u / per_group;
        column[u] = block * packed + at, byte[u] = (block * span + at) * width, group[u] = column[u] / paired;
      }
    }
  }
};

// Scales and minima of a tile as floats. score_rows reads those of up to three rows past the tile.
constexpr int MOST_PAIRS = (MOST_TILE + 4) * MOST_COLUMNS / SMALLEST_GROUP;
struct Pairs {
  float scale[MOST_PAIRS], minimum[MOST_PAIRS], levels[MOST_LEVELS];
};

struct Tile {
  const uint8_t* rows;
  int64_t stride;     // bytes
  int count, groups;  // rows, and pairs in each of them
  int64_t ahead;      // bytes from a row to the bytes that are prefetched: more than a tile
};

// Prefetches as many bytes as have just been decoded. The loops read a tile by columns, but this prefetches in memory
// order: without it the hardware prefetcher follows the columns and reaches half the bandwidth.
template <int BYTES> inline void fetch_ahead(const uint8_t*& ahead) {
  for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(ahead + i, 0, 2);
  ahead += BYTES;
}

// The same address, hidden from the compiler. A factor of two vectors is then read from memory by each of the two
// products, which is free with AVX-512, while a broadcast into a register takes a slot that decoding needs.
template <int L> inline const float* twin(const float* at) {
  if constexpr (L == 16) asm("" : "+r"(at));
  return at;
}

// Keeps a vector in its register, where the compiler would rather read it from memory for every product.
template <int L> inline Float<L> pinned(Float<L> x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#endif
  return x;
}

// scores[m][t] = query[m] . row t, four rows at once; writes up to three scores past the last row.
template <int FORMAT, int L, int M>
void score_rows(const Grid& grid, const Tile& tile, const Pairs& pairs, const float* query, float* scores) {
  using U = Unit<FORMAT, L>;
  const float* minimum[2] = {pairs.minimum, twin<L>(pairs.minimum)};
  const uint8_t* ahead = tile.rows + tile.ahead;
  for (int t = 0; t < tile.count; t += 4) {
    Float<L> sum[M][4] = {};
    const uint8_t* row[4];
    for (int r = 0; r < 4; r++) row[r] = tile.rows + std::min(t + r, tile.count - 1) * tile.stride;
    for (int u = 0; u < grid.units; u++) {
      Float<L> x[4][U::VECTORS];
      for (int r = 0; r < 4; r++) {
        U::decode(row[r] + grid.byte[u], x[r], pairs.levels);
        fetch_ahead<U::BYTES>(ahead);
        if constexpr (U::CODES) {
          const int pair = (t + r) * tile.groups + grid.group[u];
          for (int v = 0; v < U::VECTORS; v++)
            x[r][v] = U::LOOKUP ? x[r][v] * pairs.scale[pair] : x[r][v] * pairs.scale[pair] + minimum[v & 1][pair];
        }
      }
      for (int v = 0; v < U::VECTORS; v++)
        for (int m = 0; m < M; m++) {
          const float* at = query + m * STRIDE + grid.column[u] + v * grid.step;
          const Float<L> q = pinned<L>(load<Float<L>>(at));
          for (int r = 0; r < 4; r++) sum[m][r] += x[r][v] * q;
        }
    }
    for (int m = 0; m < M; m++) store(scores + m * STRIDE + t, four_sums<L>(sum[m]));
  }
}

// body(first, n) for units first .. first + n - 1, n a constant: short vectors are taken two units at a time, so that
// there are enough independent sums to hide the latency of an addition.
template <int FORMAT, int L, class Body> void each_units(int units, Body body) {
  constexpr int N = Unit<FORMAT, L>::VECTORS > 2 || L == 16 ? 1 : 2;
  int u = 0;
  for (; u + N <= units; u += N) body(u, std::integral_constant<int, N>());
  if (u < units) body(u, std::integral_constant<int, 1>());
}

// scores[m][t] = bias[m] + sum over channels of query[m][c] * code[c][t]: the slots of one block, a channel a row.
template <int FORMAT, int L, int M>
void score_block(const Grid& grid, const Tile& channels, const float* query, const float* bias, float* scores) {
  using U = Unit<FORMAT, L>;
  const float* factor[2] = {query, twin<L>(query)};
  const uint8_t* ahead = channels.rows + channels.ahead;
  each_units<FORMAT, L>(grid.units, [&](int first, auto N) {
    Float<L> sum[M][N][U::VECTORS];
    for (int m = 0; m < M; m++)
      for (auto& unit : sum[m])
        for (auto& s : unit) s = splat<L>(bias[m]);
    for (int c = 0; c < channels.count; c++) {
      Float<L> x[N][U::VECTORS];
      for (int u = 0; u < N; u++) {
        U::decode(channels.rows + c * channels.stride + grid.byte[first + u], x[u], nullptr);
        fetch_ahead<U::BYTES>(ahead);
      }
      for (int m = 0; m < M; m++)
        for (int u = 0; u < N; u++)
          for (int v = 0; v < U::VECTORS; v++) sum[m][u][v] += x[u][v] * factor[v & 1][m * STRIDE + c];
    }
    for (int m = 0; m < M; m++)
      for (int u = 0; u < N; u++)
        for (int v = 0; v < U::VECTORS; v++)
          store(scores + m * STRIDE + grid.column[first + u] + v * grid.step, sum[m][u][v]);
  });
}

// output[m] += sum over rows of weight[m][t] * row t.
template <int FORMAT, int L, int M>
void add_rows(const Grid& grid, const Tile& tile, const Pairs& pairs, const float* weight, float* output) {
  using U = Unit<FORMAT, L>;
  const float *factor[2] = {weight, twin<L>(weight)}, *minimum[2] = {pairs.minimum, twin<L>(pairs.minimum)};
  const uint8_t* ahead = tile.rows + tile.ahead;
  each_units<FORMAT, L>(grid.units, [&](int first, auto N) {
    Float<L> sum[M][N][U::VECTORS];
    for (int m = 0; m < M; m++)
      for (int u = 0; u < N; u++)
        for (int v = 0; v < U::VECTORS; v++)
          sum[m][u][v] = load<Float<L>>(output + m * STRIDE + grid.column[first + u] + v * grid.step);
    for (int t = 0; t < tile.count; t++) {
      Float<L> x[N][U::VECTORS];
      for (int u = 0; u < N; u++) {
        U::decode(tile.rows + t * tile.stride + grid.byte[first + u], x[u], pairs.levels);
        fetch_ahead<U::BYTES>(ahead);
        if constexpr (U::CODES) {
          const int pair = t * tile.groups + grid.group[first + u];
          for (int v = 0; v < U::VECTORS; v++)
            x[u][v] = U::LOOKUP ? x[u][v] * pairs.scale[pair] : x[u][v] * pairs.scale[pair] + minimum[v & 1][pair];
        }
      }
      for (int m = 0; m < M; m++)
        for (int u = 0; u < N; u++)
          for (int v = 0; v < U::VECTORS; v++) sum[m][u][v] += x[u][v] * factor[v & 1][m * STRIDE + t];
    }
    for (int m = 0; m < M; m++)
      for (int u = 0; u < N; u++)
        for (int v = 0; v < U::VECTORS; v++)
          store(output + m * STRIDE + grid.column[first + u] + v * grid.step, sum[m][u][v]);
  });
}

// body(format, lanes, queries) with all three as compile-time constants.
template <class Body, class F, class L> void with_queries(int queries, F format, L lanes, Body body) {
  switch (queries) {
    case 1: return body(format, lanes, std::integral_constant<int, 1>());
    case 2: return body(format, lanes, std::integral_constant<int, 2>());
    case 3: return body(format, lanes, std::integral_constant<int, 3>());
    default: return body(format, lanes, std::integral_constant<int, MOST_QUERIES>());
  }
}
template <class Body, class F> void with_lanes(int lanes, int queries, F format, Body body) {
  if constexpr (WIDEST >= 16)
    if (lanes == 16) return with_queries(queries, format, std::integral_constant<int, 16>(), body);
  if constexpr (WIDEST >= 8)
    if (lanes == 8) return with_queries(queries, format, std::integral_constant<int, 8>(), body);
  return with_queries(queries, format, std::integral_constant<int, 4>(), body);
}
template <class Body> void specialised(int64_t format, int lanes, int queries, Body body) {
  switch (format) {
    case FLOAT32: return with_lanes(lanes, queries, std::integral_constant<int, FLOAT32>(), body);
    case BFLOAT16: return with_lanes(lanes, queries, std::integral_constant<int, BFLOAT16>(), body);
    case FLOAT16: return with_lanes(lanes, queries, std::integral_constant<int, FLOAT16>(), body);
    case FLOAT8: return with_lanes(lanes, queries, std::integral_constant<int, FLOAT8>(), body);
    case CODES8: return with_lanes(lanes, queries, std::integral_constant<int, CODES8>(), body);
    case CODES4: return with_lanes(lanes, queries, std::integral_constant<int, CODES4>(), body);
    case CODES3: return with_lanes(lanes, queries, std::integral_constant<int, CODES3>(), body);
    case LEVELS4: return with_lanes(lanes, queries, std::integral_constant<int, LEVELS4>(), body);
    case LEVELS3: return with_lanes(lanes, queries, std::integral_constant<int, LEVELS3>(), body);
    default: return with_lanes(lanes, queries, std::integral_constant<int, CODES2>(), body);
  }
}

}  // namespace
