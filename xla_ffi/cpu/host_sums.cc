#include "cpu/host_sums.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <vector>

#include "cpu/convert.h"
#include "cpu/denormals.h"
#include "cpu/host_threads.h"

namespace jaxferry {

namespace {

// As of the host step: large enough that threads rarely contend, small enough that they finish together.
constexpr int64_t kChunk = 1 << 15;

// A stripe of a row that one thread adds; narrower ones would share cache lines.
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

// A row to add: its index in the table, then its number. As one integer, rows sort by index, then as they follow.
using Place = uint64_t;

int64_t IndexOf(Place place) { return static_cast<int64_t>(place >> 32); }

// The rows whose index is in the table, sorted: by one digit of the index after another.
std::vector<Place> SortedPlaces(const RowSum& sum) {
  constexpr int kBits = 8;
  const int64_t num_in_table = (sum.stop + sum.columns - 1) / sum.columns;
  std::vector<Place> places;
  places.reserve(static_cast<size_t>(sum.num_rows));
  for (int64_t row = 0; row < sum.num_rows; ++row) {
    const int64_t index = sum.indices[row];
    if (index >= 0 && index < num_in_table) places.push_back(static_cast<Place>(index) << 32 | static_cast<Place>(row));
  }
  std::vector<Place> sorted(places.size());
  for (int shift = 32; (static_cast<Place>(num_in_table - 1) << 32) >> shift != 0 && shift < 64; shift += kBits) {
    size_t begins[(1 << kBits) + 1] = {};
    const auto digit = [&](Place place) { return (place >> shift) & ((1 << kBits) - 1); };
    for (const Place place : places) ++begins[digit(place) + 1];
    std::partial_sum(std::begin(begins), std::end(begins), std::begin(begins));
    for (const Place place : places) sorted[begins[digit(place)]++] = place;
    places.swap(sorted);
  }
  return places;
}

// A chunk is a stripe of columns of the rows of some indices. So one thread makes each element's sum.
struct RowJob {
  const RowSum& sum;
  const std::vector<Place>& places;
  int64_t num_stripes;
  int64_t num_pieces;
};

// Where a piece of the places begins: pieces are of about the same size, and none divides an index.
size_t BeginOf(const RowJob& job, int64_t piece) {
  const auto size = static_cast<int64_t>(job.places.size());
  auto begin = static_cast<size_t>(size * piece / job.num_pieces);
  while (begin > 0 && begin < job.places.size() && IndexOf(job.places[begin]) == IndexOf(job.places[begin - 1])) ++begin;
  return begin;
}

void RunRowChunk(const void* data, int64_t chunk) {
  const RowJob& job = *static_cast<const RowJob*>(data);
  const RowSum& sum = job.sum;
  const int64_t stripe = chunk % job.num_stripes, piece = chunk / job.num_stripes;
  const int64_t first = sum.columns * stripe / job.num_stripes, last = sum.columns * (stripe + 1) / job.num_stripes;
  const DenormalsAreZero denormals_are_zero;
  thread_local std::vector<float> totals;
  const size_t end = BeginOf(job, piece + 1);
  for (size_t place = BeginOf(job, piece); place < end;) {
    const int64_t index = IndexOf(job.places[place]);
    const int64_t begin_element = std::max(index * sum.columns + first, sum.start);
    const int64_t size = std::min(index * sum.columns + last, sum.stop) - begin_element;
    size_t next = place;
    while (next < end && IndexOf(job.places[next]) == index) ++next;
    if (size > 0) {
      void* destination = Skip(sum.to, sum.table, begin_element - sum.start);
      float* total = static_cast<float*>(destination);
      if (sum.to != Dtype::kFloat32) {
        totals.resize(std::max(totals.size(), static_cast<size_t>(size)));
        total = totals.data();
        ToFloat32(sum.to, destination, total, size);
      }
      for (; place < next; ++place) {
        const auto row = static_cast<int64_t>(job.places[place] & UINT32_MAX);
        const void* added = Skip(sum.from, sum.rows, (row - index) * sum.columns + begin_element);
        Add(sum.from, added, Dtype::kFloat32, total, size);
      }
      if (sum.to != Dtype::kFloat32) FromFloat32(sum.to, total, destination, size);
    }
    place = next;
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
  if (sum.num_rows == 0 || sum.columns == 0 || sum.stop == 0) return;
  const std::vector<Place> places = SortedPlaces(sum);
  const int64_t num_threads = HostThreads::NumThreads(), num_places = static_cast<int64_t>(places.size());
  const int64_t num_stripes = std::clamp<int64_t>(sum.columns * ItemSize(sum.to) / kStripeBytes, 1, num_threads);
  // Twice as many chunks as threads even out the work; few rows are not worth it.
  const int64_t num_pieces =
      std::clamp<int64_t>(2 * num_threads / num_stripes, 1, std::max<int64_t>(num_places / 16, 1));
  const RowJob job{sum, places, num_stripes, num_pieces};
  HostThreads::Get().Run(RunRowChunk, &job, num_stripes * num_pieces);
}

}  // namespace jaxferry
