// The update of a unit, as Python calls it: from the record that it has prepared once to the parts of a host step.
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <vector>

#include "common/exports.h"
#include "cpu/emulated_time.h"
#include "cpu/host_step.h"

namespace jaxferry {

namespace {

std::atomic<int64_t> moved_bytes{0};

enum Result { kDone = 0, kNoMemory = 1, kOtherCounts = 2 };

// How a master is stored: in fp32, split, or in bf16: as fp32 numbers that bf16 holds, or as the copy alone.
enum MasterForm { kWhole = 0, kSplit = 1, kRounded = 2, kCopy = 3 };

// A parameter's place in the vectors of gradients and copies, and where master, or the rest of a split one, and moments
// and their scales are.
struct UpdateRow {
  int64_t vector, offset, size, decays, gradient_dtype, copy_dtype, form, moment_dtype;
  void *master, *first, *second;
  float *first_scale, *second_scale;
};

// README.md describes it.
struct UpdateRecord {
  int64_t rule, num_rows, num_counts;
  const double* constants;
  const UpdateRow* rows;
  const void* const* gradients;
  void* const* copies;
  int32_t* const* counts;
  const float* factors;
  const int32_t* counts_of_factors;
};

static_assert(sizeof(UpdateRow) == 13 * sizeof(int64_t) && sizeof(UpdateRecord) == 10 * sizeof(int64_t));

StepPart PartOf(const UpdateRow& row, const UpdateRecord& record) {
  StepPart part{};
  part.gradient_dtype = static_cast<Dtype>(row.gradient_dtype);
  part.copy_dtype = static_cast<Dtype>(row.copy_dtype);
  part.gradient = Skip(part.gradient_dtype, record.gradients[row.vector], row.offset);
  part.copy = Skip(part.copy_dtype, record.copies[row.vector], row.offset);
  part.rounds_master = row.form == kRounded || row.form == kCopy;
  if (row.form == kSplit) part.rest = RestAt(static_cast<uint16_t*>(row.master), row.size);
  if (row.form == kWhole || row.form == kRounded) part.master = static_cast<float*>(row.master);
  part.moment_dtype = static_cast<Dtype>(row.moment_dtype);
  part.first = row.first;
  part.second = row.second;
  part.first_scale = row.first_scale;
  part.second_scale = row.second_scale;
  part.size = row.size;
  part.decays = row.decays != 0;
  return part;
}

// The bytes that a step reads and writes: gradient and copy once, master and moments twice. A split master is the copy,
// which is read too, and its rest, if it has one.
int64_t MovedBytes(const StepPart& part, StepRule rule) {
  const int64_t moments = NumMoments(rule) * ItemSize(part.moment_dtype);
  int64_t arrived = part.size * (ItemSize(part.gradient_dtype) + ItemSize(part.copy_dtype) + 2 * moments);
  if (part.moment_dtype == kCode) arrived += 4 * sizeof(float) * NumMomentBlocks(part.size);
  if (part.master != nullptr) return arrived + 2 * sizeof(float) * part.size;
  arrived += sizeof(uint16_t) * part.size;
  return part.rest.low == nullptr ? arrived : arrived + 2 * (sizeof(uint16_t) * part.size + (part.size + 7) / 8);
}

StepConstants ConstantsFrom(const double* c) {
  return {static_cast<float>(c[0]),     static_cast<float>(1 - c[0]), static_cast<float>(c[1]),
          static_cast<float>(1 - c[1]), static_cast<float>(c[2]),     static_cast<float>(c[3])};
}

Result Update(const UpdateRecord& record) {
  for (int64_t i = 0; i < record.num_counts; ++i) {
    if (*record.counts[i] != record.counts_of_factors[i]) return kOtherCounts;
  }
  // Kept per thread, so that calls stop allocating once it fits the largest layer.
  thread_local std::vector<StepPart> parts;
  parts.resize(static_cast<size_t>(record.num_rows));
  const StepRule rule = static_cast<StepRule>(record.rule);
  int64_t num_bytes = 0;
  for (int64_t i = 0; i < record.num_rows; ++i) {
    parts[i] = PartOf(record.rows[i], record);
    num_bytes += MovedBytes(parts[i], rule);
  }
  moved_bytes += num_bytes;
  const EmulatedTime updating(kHost, num_bytes);
  const float* f = record.factors;
  const StepFactors factors{f[0], f[1], f[2], f[3], f[4], f[5], f[6]};
  const uint32_t seed = record.num_counts > 0 ? static_cast<uint32_t>(*record.counts[0]) : 0;
  RunHostStep({rule, factors, ConstantsFrom(record.constants), seed, parts.data(), record.num_rows});
  for (int64_t i = 0; i < record.num_counts; ++i) {
    *record.counts[i] += *record.counts[i] < std::numeric_limits<int32_t>::max();
  }
  return kDone;
}

int64_t AllMovedBytes() { return moved_bytes; }

}  // namespace

}  // namespace jaxferry

int jaxferry_host_update(const void* record) {
  try {
    return jaxferry::Update(*static_cast<const jaxferry::UpdateRecord*>(record));
  } catch (const std::exception&) {
    return jaxferry::kNoMemory;
  }
}

int64_t jaxferry_host_step_bytes() { return jaxferry::AllMovedBytes(); }
