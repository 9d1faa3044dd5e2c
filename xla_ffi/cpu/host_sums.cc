#include "cpu/host_sums.h"

#include <algorithm>
#include <cstring>

#include "cpu/convert.h"
#include "cpu/denormals.h"
#include "cpu/host_threads.h"

namespace jaxferry {

namespace {

// As of the host step: large enough that threads rarely contend, small enough that they finish together.
constexpr int64_t kChunk = 1 << 15;

// A stripe of a row that one thread adds; narrower ones would share cache lines and repeat the search.
constexpr int64_t kStripeBytes = 1024;

struct VectorSum {
  Dtype from;
  const void* source;
  Dtype to;
  void* destination;
  int64_t size;
  bool adds;
};

// Copies of so many elements bypass the caches, which saves reading what they overwrite.
constexpr int64_t kCopyChunk = 1 << 21;

int64_t ChunkOf(const VectorSum& sum) { return sum.adds || sum.from != sum.to ? kChunk : kCopyChunk; }

void RunVectorChunk(const void* data, int64_t chunk) {
  const VectorSum& sum = *static_cast<const VectorSum*>(data);
  const int64_t start = chunk * ChunkOf(sum), size = std::min(ChunkOf(sum), sum.size - start);
  const void* source = Skip(sum.from, sum.source, start);
  void* destination = Skip(sum.to, sum.destination, start);
  if (!sum.adds) return Cast(sum.from, source, sum.to, destination, size);
  const DenormalsAreZero denormals_are_zero;
  Add(sum.from, source, sum.to, destination, size);
}

void Run(const VectorSum& sum) {
  HostThreads::Get().Run(RunVectorChunk, &sum, (sum.size + ChunkOf(sum) - 1) / ChunkOf(sum));
}

struct Clearing {
  char* destination;
  int64_t num_bytes;
};

void RunClearingChunk(const void* data, int64_t chunk) {
  const Clearing& clearing = *static_cast<const Clearing*>(data);
  const int64_t start = chunk * 4 * kChunk;
  std::memset(clearing.destination + start, 0, std::min(4 * kChunk, clearing.num_bytes - start));
}

// A chunk is a stripe of columns of every row whose index has a given remainder. So one thread makes each element's sum.
struct RowJob {
  const RowSum& sum;
  int64_t num_stripes;
  int64_t num_remainders;
};

void RunRowChunk(const void* data, int64_t chunk) {
  const RowJob& job = *static_cast<const RowJob*>(data);
  const RowSum& sum = job.sum;
  const int64_t stripe = chunk % job.num_stripes, remainder = chunk / job.num_stripes;
  const int64_t first = sum.columns * stripe / job.num_stripes, last = sum.columns * (stripe + 1) / job.num_stripes;
  const int64_t num_in_table = (sum.stop + sum.columns - 1) / sum.columns;
  const DenormalsAreZero denormals_are_zero;
  for (int64_t row = 0; row < sum.num_rows; ++row) {
    const int64_t index = sum.indices[row];
    if (index < 0 || index >= num_in_table || index % job.num_remainders != remainder) continue;
    const int64_t begin = std::max(index * sum.columns + first, sum.start);
    const int64_t end = std::min(index * sum.columns + last, sum.stop);
    if (begin >= end) continue;
    Add(sum.from, Skip(sum.from, sum.rows, (row - index) * sum.columns + begin), sum.to,
        Skip(sum.to, sum.table, begin - sum.start), end - begin);
  }
}

}  // namespace

void CastOnHost(Dtype from, const void* source, Dtype to, void* destination, int64_t size) {
  Run({from, source, to, destination, size, false});
}

void AddOnHost(Dtype from, const void* source, Dtype to, void* destination, int64_t size) {
  Run({from, source, to, destination, size, true});
}

void ClearOnHost(void* destination, int64_t num_bytes) {
  const Clearing clearing{static_cast<char*>(destination), num_bytes};
  HostThreads::Get().Run(RunClearingChunk, &clearing, (num_bytes + 4 * kChunk - 1) / (4 * kChunk));
}

void AddRowsOnHost(const RowSum& sum) {
  if (sum.num_rows == 0 || sum.columns == 0) return;
  const int64_t num_threads = HostThreads::NumThreads();
  const int64_t num_stripes =
      std::clamp<int64_t>(sum.columns * ItemSize(sum.to) / kStripeBytes, 1, num_threads);
  // Twice as many chunks as threads even out the work; few rows are not worth the search.
  const int64_t num_remainders =
      std::clamp<int64_t>(2 * num_threads / num_stripes, 1, std::max<int64_t>(sum.num_rows / 16, 1));
  const RowJob job{sum, num_stripes, num_remainders};
  HostThreads::Get().Run(RunRowChunk, &job, num_stripes * num_remainders);
}

}  // namespace jaxferry
