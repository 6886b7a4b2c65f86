// Quantises groups and packs their codes, equal to quantise.py to the bit. It is one call where torch takes a dozen
// operations, which are pure overhead for the single row that leaves a residual.

#pragma once

#include <cmath>

#include "vectors.h"

namespace {

// To the nearest float16, ties to even.
uint16_t nearest_half(float x) {
  const uint32_t word = bits<uint32_t>(x), sign = word >> 16 & 0x8000, size = word & 0x7fffffff;
  if (x != x) return 0x7e00;
  if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and more
  if (size < 113 << 23)  // below the smallest normal number: the last bit of a float from 0.5 on is worth 2^-24
    return uint16_t(sign | (bits<uint32_t>(bits<float>(size) + 0.5f) - bits<uint32_t>(0.5f)));
  return uint16_t(sign | (size + 0xfff + (size >> 13 & 1) - (112 << 23)) >> 13);
}

float from_half(uint16_t half) {
  const uint16_t padded[4] = {half};
  return load_float16<4>(padded)[0];
}

struct Groups {  // counted in elements; codes and pairs have no gaps
  int64_t sizes[4], size, width;     // groups in four dimensions, numbers in each, and bits of a code
  int64_t strides[4], stride;        // between groups, and between a group's numbers
  int64_t numbers, codes, scale, minimum;  // float32; bytes; float16
};

void encode_group(const float* x, const Groups& groups, uint8_t* codes, uint16_t& scale, uint16_t& minimum) {
  float low = x[0], high = x[0], largest = 65504.0f, levels = float((1 << groups.width) - 1);
  bool missing = false;
  for (int64_t i = 0; i < groups.size; i++) {
    const float number = x[i * groups.stride];
    low = number < low ? number : low, high = number > high ? number : high, missing |= number != number;
  }
  if (missing) low = high = NAN;
  const float step = (high - low) / levels;
  scale = nearest_half(step > largest ? largest : step);
  minimum = nearest_half(low > largest ? largest : low < -largest ? -largest : low);
  const float stored_scale = from_half(scale), stored_minimum = from_half(minimum);
  const int64_t width = groups.width, lane = width == 3 ? groups.size / 4 : groups.size * width / 8;
  std::memset(codes, 0, groups.size * width / 8);
  for (int64_t turn = 0; turn * lane < groups.size && stored_scale > 0; turn++)
    for (int64_t i = 0; i < lane; i++) {
      const float steps = (x[(turn * lane + i) * groups.stride] - stored_minimum) / stored_scale;
      const int code = int(std::nearbyint(steps < 0 ? 0.0f : steps > levels ? levels : steps));
      if (width != 3) {
        codes[i] |= uint8_t(code << turn * width);
      } else {  // two low bits, then the high bit, eight to a byte
        codes[i] |= uint8_t((code & 3) << turn * 2);
        codes[lane + i % (lane / 2)] |= uint8_t((code >> 2) << (turn * 2 + (i >= lane / 2)));
      }
    }
}

}  // namespace

extern "C" void kvbench_encode(const int64_t* packed_groups) {
  const Groups& groups = *reinterpret_cast<const Groups*>(packed_groups);
  uint8_t* codes = reinterpret_cast<uint8_t*>(groups.codes);
  uint16_t *scale = reinterpret_cast<uint16_t*>(groups.scale), *minimum = reinterpret_cast<uint16_t*>(groups.minimum);
  const int64_t *size = groups.sizes, *stride = groups.strides;
  for (int64_t i = 0; i < size[0] * size[1] * size[2] * size[3]; i++, codes += groups.size * groups.width / 8) {
    int64_t at = 0, rest = i;
    for (int d = 3; d >= 0; rest /= size[d--]) at += rest % size[d] * stride[d];
    encode_group(reinterpret_cast<const float*>(groups.numbers) + at, groups, codes, *scale++, *minimum++);
  }
}
