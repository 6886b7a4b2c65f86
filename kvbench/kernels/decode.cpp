// Decode attention over a KV cache that is read in place: rows of floats, groups of packed codes, or rows of codes of a
// codebook.
//
// The work is split over (batch row, KV head, range of slots). A task reads its range in chunks of slots: the scores of
// all queries that share the KV head, one step of a running softmax, then the values of the same slots. So every byte of
// the cache is read once, and keys and values may be cut into parts at different slots. Values that are decoded into
// registers serve up to four queries.
//
// Do not compile with -ffast-math: masks need infinities, and linking with it turns off denormals in the whole process.

#include <atomic>
#include <memory>
#include <vector>

#include "digits.h"
#include "encode.h"
#include "worker.h"

extern "C" void kvbench_attend(const int64_t* packed_call, double scaling, double softcap) {
  const Call& call = *reinterpret_cast<const Call*>(packed_call);
  const Plan plan(call);
  const int64_t head_floats = plan.splits * plan.task_floats();
  const std::unique_ptr<float[]> tasks(new float[plan.heads * head_floats]);
  const int64_t chunk_maxima = call.probabilities ? plan.heads * call.rows() * plan.chunks : 0;
  const std::unique_ptr<float[]> maxima(new float[chunk_maxima]);
  std::vector<std::atomic<int64_t>> finished(plan.heads);
#pragma omp parallel num_threads(int(plan.threads)) if (plan.threads > 1)
  {
    Worker worker(plan);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t task = 0; task < plan.heads * plan.splits; task++) {
      const int64_t head = task / plan.splits, split = task % plan.splits;
      float* tasks_of_head = tasks.get() + head * head_floats;
      worker.run(head, split, float(scaling), float(softcap), tasks_of_head + split * plan.task_floats(), maxima.get());
      // The thread that finishes a head's last split merges it, so no thread waits for another until the end.
      if (++finished[head] == plan.splits) worker.merge(head, tasks_of_head, maxima.get());
    }
  }
}

// Reads memory and adds it up: measures the bandwidth that the kernel above is compared with.
extern "C" float kvbench_read(const float* from, int64_t floats, [[maybe_unused]] int64_t threads) {
  constexpr int64_t BLOCK = 1 << 16;
  float sum = 0.0f;
#pragma omp parallel for num_threads(int(threads)) if (threads > 1) schedule(static) reduction(+ : sum)
  for (int64_t block = 0; block < floats / BLOCK; block++) {
    Float<WIDEST> part[8] = {};
    for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i += 8 * WIDEST)
      for (int j = 0; j < 8; j++) part[j] += load<Float<WIDEST>>(from + i + j * WIDEST);
    for (const auto& p : part) sum += total<WIDEST>(p);
  }
  return sum;
}
