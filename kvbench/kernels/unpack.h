// Packed rows to floats one value at a time, and runs of float16 scales: for what the vector loops do not take.

#pragma once

#include "call.h"

namespace {

inline float read_half(const uint8_t* at) {
  const uint8_t padded[8] = {at[0], at[1]};
  return load_float16<4>(padded)[0];
}

// Also prefetches the bytes `ahead` of these: runs of pairs are too short for the hardware prefetcher.
void read_halves(const uint8_t* from, int n, float* to, int64_t ahead) {
  int i = 0;
  for (; i + WIDEST <= n; i += WIDEST) {
    if (i % 32 == 0) __builtin_prefetch(from + 2 * i + ahead);
    store(to + i, load_float16<WIDEST>(from + 2 * i));
  }
  for (; i < n; i++) to[i] = read_half(from + 2 * i);
}

// Code i of a group. 3-bit codes are their two low bits, packed so, followed by their high bit.
int code_at(const uint8_t* group, int64_t i, const Part& part) {
  const auto piece = [i](const uint8_t* from, int64_t lane, int bits) {
    return from[i % lane] >> (i / lane * bits) & ((1 << bits) - 1);
  };
  if (part.bits() != 3) return piece(group, part.lane_bytes(), part.bits());
  return piece(group, part.group / 4, 2) | piece(group + part.group / 4, part.group / 8, 1) << 2;
}

// Slots of a packed part to floats one by one: for group sizes and cuts that the vector loops do not take.
void unpack_rows(const Part& part, int64_t b, int64_t h, int64_t first, int n, int columns, float* to) {
  const uint8_t* codes = address(part.data, b * part.batch_stride + h * part.head_stride);
  const int64_t pairs = b * part.pair_batch_stride + h * part.pair_head_stride, group = part.group;
  for (int64_t t = first; t < first + n; t++)
    for (int64_t c = 0; c < columns; c++) {
      const int64_t at = part.token_axis ? t / group * columns + c : (t * columns + c) / group;
      const int code = code_at(codes + at * part.lane_bytes(), (part.token_axis ? t : c) % group, part);
      if (part.has_levels()) {
        *to++ = floats_at(part.minimum)[code] * read_half(address(part.scale, pairs + 2 * t));
        continue;
      }
      const float scale = read_half(address(part.scale, pairs + 2 * at));
      const float low = part.minimum ? read_half(address(part.minimum, pairs + 2 * at)) : -part.centre() * scale;
      *to++ = float(code) * scale + low;
    }
}

}  // namespace
