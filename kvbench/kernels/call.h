// One call of kvbench_attend as cpu.py packs it, and how its slots are cut into chunks and tasks.

#pragma once

#include <vector>

#include "digits.h"

namespace {

struct Part {  // strides in bytes
  int64_t format, token_axis, group, slots;
  int64_t data, batch_stride, head_stride, row_stride;  // a row is a slot, or with token_axis a block of `group` slots
  // float16, without gaps within a head. Where minimum is 0, codes are centred: see `centre`.
  int64_t scale, minimum, pair_batch_stride, pair_head_stride;
  // int32, strides in entries: which `block` rows hold slots i * block and following; block is 0 where none is needed.
  int64_t table, table_batch_stride, table_head_stride, block;

  bool has_levels() const { return format >= LEVELS; }  // `scale` is then one a row, `minimum` the codebook's floats
  int bits() const { return code_bits(format); }
  float centre() const { return float(1 << (bits() - 1)); }  // the code of 0, where a group has no minimum of its own
  int lane_bytes() const { return int(group * bits() / 8); }  // of a group's codes
  int paired(int columns) const { return has_levels() ? columns : int(group); }  // columns that share a scale
};

struct Call {  // strides in elements; an absent tensor is 0
  int64_t batch, kv_heads, heads, tokens, key_dim, value_dim, slots, threads, key_parts, value_parts;
  int64_t last_dim, last_parts;  // keys that are held in two places: their channels from key_dim on, 0 where there are none
  int64_t query, query_batch, query_head, query_token;            // float32 [batch, kv_heads * heads, tokens, key_dim + last_dim]
  int64_t sink_query, sink_batch, sink_head, sink_token, n_sink;  // likewise, for the first n_sink slots
  int64_t sink_logits;                                            // float32 [kv_heads * heads]
  int64_t mask, mask_batch, mask_head, mask_token;                // bytes [batch, kv_heads, tokens, slots]
  int64_t lengths;                // int64 [batch, kv_heads], the slots of each; absent: all have all
  int64_t output, probabilities;  // float32 [batch, kv_heads, heads, tokens, value_dim] and [.., slots]
  Part parts[1];                  // of the keys, of the values, then of the keys' last channels

  int rows() const { return int(heads * tokens); }
  int64_t slots_of(int64_t head) const {
    return lengths ? std::min(slots, reinterpret_cast<const int64_t*>(lengths)[head]) : slots;
  }
};

inline const uint8_t* address(int64_t pointer, int64_t bytes) {
  return reinterpret_cast<const uint8_t*>(pointer) + bytes;
}
inline float* floats_at(int64_t pointer) { return reinterpret_cast<float*>(pointer); }

constexpr int64_t MOST_CHUNK = 512;         // slots between two steps of the running softmax; below STRIDE
constexpr int64_t SLOTS_PER_THREAD = 1024;  // fewer take less time than waking up a thread
constexpr float LOWEST = -1e30f;            // the first running maximum; finite, so that masked slots weigh 0 and not NaN

// Shared by all tasks: how the slots are cut, and where the units of each part lie.
struct Plan {
  const Call& call;
  int64_t chunk = MOST_CHUNK, chunks, splits, heads, threads;
  std::vector<Grid> packed, unpacked;

  explicit Plan(const Call& c) : call(c), heads(c.batch * c.kv_heads) {
    for (int64_t i = 0; i < c.key_parts + c.value_parts + c.last_parts; i++) {
      const Part& part = c.parts[i];
      const int64_t values_end = c.key_parts + c.value_parts;
      const int columns = int(i < c.key_parts ? c.key_dim : i < values_end ? c.value_dim : c.last_dim);
      const int group = int(part.group);
      packed.emplace_back(part.format, part.token_axis ? group : columns, group, part.paired(columns));
      unpacked.emplace_back(FLOAT32, columns, columns, columns);
      if (part.token_axis && group <= MOST_CHUNK && chunk % group) chunk = MOST_CHUNK / group * group;
    }
    chunks = (c.slots + chunk - 1) / chunk;
    int64_t in_all = 0;
    for (int64_t head = 0; head < heads; head++) in_all += c.slots_of(head);
    threads = std::min(c.threads, 1 + in_all / SLOTS_PER_THREAD);
    splits = threads == 1 ? 1 : std::min(chunks, (4 * threads + heads - 1) / heads);
  }
  int64_t task_floats() const { return call.rows() * (2 + call.value_dim); }  // maxima, sums, unnormalised output
};

}  // namespace
