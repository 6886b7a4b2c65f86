// One thread of decode attention with its scratch memory: scores, running softmax and weighted values of its tasks.

#pragma once

#include <cmath>
#include <memory>

#include "unpack.h"

namespace {

struct Worker {
  using Rows = std::unique_ptr<float[]>;  // [rows, STRIDE]

  const Plan& plan;
  const Call& call;
  const int rows, key_dim, value_dim;
  Rows query, sink_query, last_query, scores, sink_scores, last_scores, fresh, unpacked;
  std::unique_ptr<Pairs> pairs{new Pairs};
  float scaled[MOST_QUERIES * STRIDE], bias[MOST_QUERIES];
  int64_t b = 0, h = 0;

  explicit Worker(const Plan& p)
      : plan(p), call(p.call), rows(call.rows()), key_dim(int(call.key_dim)), value_dim(int(call.value_dim)),
        query(new float[rows * STRIDE]), scores(new float[rows * STRIDE]), fresh(new float[rows * STRIDE]) {
    if (call.n_sink) sink_query.reset(new float[rows * STRIDE]), sink_scores.reset(new float[rows * STRIDE]);
    if (call.last_parts) last_query.reset(new float[rows * STRIDE]), last_scores.reset(new float[rows * STRIDE]);
  }

  // Queries of this KV head as rows, the scale of the scores folded in: `columns` channels of them from `first` on.
  void read_query(int64_t from, int64_t batch, int64_t head, int64_t token, float scaling, const Rows& to, int first,
                  int columns) {
    for (int m = 0; m < rows; m++) {
      const int64_t row = b * batch + (h * call.heads + m / call.tokens) * head + m % call.tokens * token + first;
      for (int d = 0; d < columns; d++) to[m * STRIDE + d] = floats_at(from)[row + d] * scaling;
    }
  }

  // body(m, n): query rows m .. m + n - 1, in even pieces of at most MOST_QUERIES.
  template <class Body> void each_piece(Body body) const {
    const int pieces = (rows + MOST_QUERIES - 1) / MOST_QUERIES;
    for (int i = 0; i < pieces; i++) body(rows * i / pieces, rows * (i + 1) / pieces - rows * i / pieces);
  }

  // body(part, index, from, n, at): slots from .. from + n - 1 of each part in [first, last); `at` counts from first.
  template <class Body> void each_part(int64_t begin, int64_t n, int64_t first, int64_t last, Body body) const {
    for (int64_t i = begin, start = 0; i < begin + n; start += call.parts[i++].slots) {
      const int64_t from = std::max(first, start), to = std::min(last, start + call.parts[i].slots);
      if (from < to) body(call.parts[i], int(i), from - start, int(to - from), from - first);
    }
  }

  // The row that holds a slot of a part.
  int64_t row_of(const Part& part, int64_t slot) const {
    if (!part.block) return slot;
    const int64_t entry = b * part.table_batch_stride + h * part.table_head_stride + slot / part.block;
    return reinterpret_cast<const int32_t*>(part.table)[entry] * part.block + slot % part.block;
  }

  // How many of n slots lie in rows that follow one another, from `slot`, which is in `row`, on.
  int run_of(const Part& part, int64_t slot, int64_t row, int n) const {
    if (!part.block) return n;
    int64_t run = part.block - slot % part.block;
    while (run < n && row_of(part, slot + run) == row + run) run += part.block;
    return int(std::min<int64_t>(run, n));
  }

  // body(format, grid, tile, at) for n slots of a part, row by row in tiles; `at` counts from the first.
  template <class Body> void each_tile(const Part& part, int index, int64_t from, int n, int columns, Body body) {
    const int64_t head = b * part.batch_stride + h * part.head_stride;
    const int64_t pair_head = b * part.pair_batch_stride + h * part.pair_head_stride;
    const int most = std::max(8, std::min(MOST_TILE, int(TILE_BYTES / part.row_stride)));
    for (int at = 0, count; at < n; at += count) {
      const int64_t row = row_of(part, from + at), later = std::min(from + at + 2 * most, part.slots - 1);
      count = run_of(part, from + at, row, std::min(most, n - at));
      const uint8_t* rows = address(part.data, head + row * part.row_stride);
      const int64_t ahead = part.block ? row_of(part, later) - row : 2 * most;
      Tile tile{rows, part.row_stride, count, 0, ahead * part.row_stride};
      if (part.token_axis || !plan.packed[index].lanes) {
        if (!unpacked) unpacked.reset(new float[MOST_TILE * MOST_COLUMNS]);
        unpack_rows(part, b, h, row, tile.count, columns, unpacked.get());
        tile.rows = reinterpret_cast<const uint8_t*>(unpacked.get()), tile.stride = 4 * columns, tile.ahead = 0;
        body(int64_t(FLOAT32), plan.unpacked[index], tile, at);
        continue;
      }
      if (has_codes(part.format)) {
        tile.groups = columns / part.paired(columns);
        const int64_t first = pair_head + 2 * row * tile.groups;
        const int n_pairs = tile.count * tile.groups, pairs_ahead = 4 * most * tile.groups;
        read_halves(address(part.scale, first), n_pairs, pairs->scale, pairs_ahead);
        if (part.has_levels()) memcpy(pairs->levels, floats_at(part.minimum), 4 << part.bits());
        else if (!part.minimum) for (int i = 0; i < n_pairs; i++) pairs->minimum[i] = -part.centre() * pairs->scale[i];
        else read_halves(address(part.minimum, first), n_pairs, pairs->minimum, pairs_ahead);
      }
      body(part.format, plan.packed[index], tile, at);
    }
  }

  // Keys whose groups run along tokens. KIVI's folding, q . k = sum (q scale) code + sum q minimum, once a block; where
  // groups run along channels it would cost a product for every group and query, which is more than decoding does.
  void score_blocks(const Part& part, int index, const Rows& q, int64_t from, int n, float* to) {
    const int64_t pair_head = b * part.pair_batch_stride + h * part.pair_head_stride;
    for (int64_t block = from / part.group; block * part.group < from + n; block++, to += part.group) {
      read_halves(address(part.scale, pair_head + 2 * block * key_dim), key_dim, pairs->scale, 8 * key_dim);
      read_halves(address(part.minimum, pair_head + 2 * block * key_dim), key_dim, pairs->minimum, 8 * key_dim);
      const int64_t data = b * part.batch_stride + h * part.head_stride + block * part.row_stride;
      const Tile channels{address(part.data, data), part.lane_bytes(), key_dim, 0, 4 * part.row_stride};
      each_piece([&](int m, int queries) {
        specialised(part.format, plan.packed[index].lanes, queries, [&](auto F, auto L, auto M) {
          if constexpr (by_digits<F, L>())
            return score_by_digits<F, M>(plan.packed[index], channels, *pairs, &q[m * STRIDE], to + m * STRIDE);
          for (int i = 0; i < queries; i++) fold_pairs(&q[(m + i) * STRIDE], scaled + i * STRIDE, bias[i]);
          if constexpr (F < 16) score_block<F, L, M>(plan.packed[index], channels, scaled, bias, to + m * STRIDE);
        });
      });
    }
  }

  void fold_pairs(const float* q, float* scaled_query, float& constant) const {
    using V = Float<WIDEST < 8 ? WIDEST : 8>;  // heads are multiples of 8
    V sum{};
    for (int d = 0; d < key_dim; d += int(sizeof(V) / 4)) {
      const V x = load<V>(q + d);
      store(scaled_query + d, x * load<V>(pairs->scale + d));
      sum += x * load<V>(pairs->minimum + d);
    }
    constant = total<sizeof(V) / 4>(sum);
  }

  // Scores of slots [first, last) over the channels that `parts` parts from `begin` on hold; those of query row m begin
  // at to[m * STRIDE].
  void score(const Rows& q, int64_t begin, int64_t parts, int columns, int64_t first, int64_t last, float* to) {
    each_part(begin, parts, first, last, [&](const Part& part, int index, int64_t from, int n, int64_t at) {
      if (part.token_axis && plan.packed[index].lanes && from % part.group == 0 && n % part.group == 0)
        return score_blocks(part, index, q, from, n, to + at);
      each_tile(part, index, from, n, columns, [&](int64_t format, const Grid& grid, const Tile& tile, int offset) {
        each_piece([&](int m, int queries) {
          specialised(format, grid.lanes, queries, [&](auto F, auto L, auto M) {
            score_rows<F, L, M>(grid, tile, *pairs, &q[m * STRIDE], to + m * STRIDE + at + offset);
          });
        });
      });
    });
  }

  // The values of slots [first, last), weighted by what `scores` holds now, added to `fresh`.
  void add_values(int64_t first, int64_t last) {
    const int64_t begin = call.key_parts;
    each_part(begin, call.value_parts, first, last, [&](const Part& part, int index, int64_t from, int n, int64_t at) {
      each_tile(part, index, from, n, value_dim, [&](int64_t format, const Grid& grid, const Tile& tile, int offset) {
        each_piece([&](int m, int queries) {
          specialised(format, grid.lanes, queries, [&](auto F, auto L, auto M) {
            const float* weight = &scores[m * STRIDE + at + offset];
            if constexpr (by_digits<F, L>())  // which takes no scales below 0, as those of centred codes may be
              if (part.minimum) return add_by_digits<F, M>(grid, tile, *pairs, weight, &fresh[m * STRIDE]);
            add_rows<F, L, M>(grid, tile, *pairs, weight, &fresh[m * STRIDE]);
          });
        });
      });
    });
  }

  // Row m's n scores from slot `first` on become weights relative to the running maximum. Returns the factor by which
  // earlier weights shrink.
  float soften(int m, int64_t first, int n, float softcap, float& running_maximum, float& sum) {
    using V = Float<WIDEST>;
    float* row = &scores[m * STRIDE];
    if (call.mask) {
      const int64_t token = m % call.tokens * call.mask_token;
      const uint8_t* seen = address(call.mask, b * call.mask_batch + h * call.mask_head + token + first);
      for (int t = 0; t < n; t++) row[t] = seen[t] ? row[t] : -INFINITY;
    }
    for (int t = n; t % WIDEST; t++) row[t] = -INFINITY;
    V top = splat<WIDEST>(running_maximum), added{};
    for (int t = 0; t < n; t += WIDEST) {
      V x = load<V>(row + t);
      if (softcap > 0) {
        x = select<WIDEST>(x == -INFINITY, x, softcap * hyperbolic_tangent<WIDEST>(x / softcap));
        store(row + t, x);
      }
      top = maximum<WIDEST>(top, x);
    }
    float highest = running_maximum;
    for (int i = 0; i < WIDEST; i++) highest = std::max(highest, top[i]);
    for (int t = 0; t < n; t += WIDEST) {
      const V weight = exponential<WIDEST>(load<V>(row + t) - highest);
      store(row + t, weight);
      added += weight;
    }
    const float factor = std::exp(running_maximum - highest);
    sum = sum * factor + total<WIDEST>(added);
    running_maximum = highest;
    return factor;
  }

  // The slots of one split; see Plan::task_floats for what is left in `task`.
  void run(int64_t head, int64_t split, float scaling, float softcap, float* task, float* chunk_maxima) {
    b = head / call.kv_heads, h = head % call.kv_heads;
    const auto read_own = [&](const Rows& to, int first, int columns) {
      read_query(call.query, call.query_batch, call.query_head, call.query_token, scaling, to, first, columns);
    };
    read_own(query, 0, key_dim);
    if (call.last_parts) read_own(last_query, key_dim, int(call.last_dim));
    if (call.n_sink)
      read_query(call.sink_query, call.sink_batch, call.sink_head, call.sink_token, scaling, sink_query, 0, key_dim);
    float *maxima = task, *sums = task + rows, *output = sums + rows;
    std::fill(maxima, sums, LOWEST);
    std::fill(sums, task + plan.task_floats(), 0.0f);
    for (int64_t i = plan.chunks * split / plan.splits; i < plan.chunks * (split + 1) / plan.splits; i++) {
      const int64_t first = i * plan.chunk, end = std::min(call.slots, first + plan.chunk);
      const int64_t last = std::clamp(call.slots_of(head), first, end);
      for (int m = 0; m < rows && call.probabilities; m++) {
        std::fill(probability_row(head, m) + last, probability_row(head, m) + end, 0.0f);
        chunk_maxima[(head * rows + m) * plan.chunks + i] = LOWEST;
      }
      if (first == last) continue;
      score(query, 0, call.key_parts, key_dim, first, last, scores.get());
      if (call.last_parts) {
        const int64_t begin = call.key_parts + call.value_parts;
        score(last_query, begin, call.last_parts, int(call.last_dim), first, last, last_scores.get());
        for (int m = 0; m < rows; m++)
          for (int64_t t = 0; t < last - first; t++) scores[m * STRIDE + t] += last_scores[m * STRIDE + t];
      }
      if (const int64_t sinks = std::min(last, call.n_sink) - first; sinks > 0) {
        score(sink_query, 0, call.key_parts, key_dim, first, first + sinks, sink_scores.get());
        for (int m = 0; m < rows; m++) memcpy(&scores[m * STRIDE], &sink_scores[m * STRIDE], 4 * sinks);
      }
      for (int m = 0; m < rows; m++) {
        const float factor = soften(m, first, int(last - first), softcap, maxima[m], sums[m]);
        for (int d = 0; d < value_dim && factor != 1.0f; d++) output[m * value_dim + d] *= factor;
        if (!call.probabilities) continue;
        memcpy(probability_row(head, m) + first, &scores[m * STRIDE], 4 * (last - first));
        chunk_maxima[(head * rows + m) * plan.chunks + i] = maxima[m];
      }
      // A chunk is summed by itself first: fewer roundings over a long cache.
      std::fill(&fresh[0], &fresh[rows * STRIDE], 0.0f);
      add_values(first, last);
      for (int m = 0; m < rows; m++)
        for (int d = 0; d < value_dim; d++) output[m * value_dim + d] += fresh[m * STRIDE + d];
    }
  }

  float* probability_row(int64_t head, int m) const {
    return floats_at(call.probabilities) + (head * rows + m) * call.slots;
  }

  // The splits of one KV head become its output; weights become probabilities.
  void merge(int64_t head, const float* tasks, const float* chunk_maxima) const {
    for (int m = 0; m < rows; m++) {
      float highest = LOWEST, sum = 0.0f, *output = floats_at(call.output) + (head * rows + m) * value_dim;
      for (int64_t s = 0; s < plan.splits; s++) highest = std::max(highest, tasks[s * plan.task_floats() + m]);
      if (call.sink_logits) {
        const float logit = floats_at(call.sink_logits)[head % call.kv_heads * call.heads + m / call.tokens];
        highest = std::max(highest, logit), sum = std::exp(logit - highest);
      }
      std::fill(output, output + value_dim, 0.0f);
      for (int64_t s = 0; s < plan.splits; s++) {
        const float* task = tasks + s * plan.task_floats();
        const float weight = std::exp(task[m] - highest), *from = task + 2 * rows + m * value_dim;
        sum += weight * task[rows + m];
        for (int d = 0; d < value_dim; d++) output[d] += weight * from[d];
      }
      for (int d = 0; d < value_dim; d++) output[d] /= sum;
      for (int64_t i = 0; call.probabilities && i < plan.chunks; i++) {
        const float factor = std::exp(chunk_maxima[(head * rows + m) * plan.chunks + i] - highest) / sum;
        float *row = probability_row(head, m), *end = row + std::min(call.slots, (i + 1) * plan.chunk);
        for (float* p = row + i * plan.chunk; p < end; p++) *p *= factor;
      }
    }
  }
};

}  // namespace
