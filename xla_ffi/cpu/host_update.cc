// The update of a unit, as Python calls it: from the table that it has prepared once to the parts of a host step.
#include <atomic>
#include <exception>
#include <vector>

#include "common/exports.h"
#include "cpu/emulated_time.h"
#include "cpu/host_step.h"

namespace jaxferry {

namespace {

std::atomic<int64_t> moved_bytes{0};

// A row of the table: a parameter's place in the vectors of gradients and copies, and where master and moments are.
struct UpdateRow {
  int64_t vector, offset, size, decays, gradient_dtype, copy_dtype;
  float *master, *first, *second;
};

static_assert(sizeof(UpdateRow) == 9 * sizeof(int64_t));

StepPart PartOf(const UpdateRow& row, const void* const* gradients, void* const* copies) {
  StepPart part{};
  part.gradient_dtype = static_cast<Dtype>(row.gradient_dtype);
  part.copy_dtype = static_cast<Dtype>(row.copy_dtype);
  part.gradient = Skip(part.gradient_dtype, gradients[row.vector], row.offset);
  part.copy = Skip(part.copy_dtype, copies[row.vector], row.offset);
  part.master = row.master;
  part.first = row.first;
  part.second = row.second;
  part.size = row.size;
  part.decays = row.decays != 0;
  return part;
}

// The bytes that a step reads and writes: gradient and copy once, master and moments twice.
int64_t MovedBytes(const StepPart& part, StepRule rule) {
  const int64_t updated = 2 * sizeof(float) * (1 + NumMoments(rule));
  return part.size * (ItemSize(part.gradient_dtype) + ItemSize(part.copy_dtype) + updated);
}

StepConstants ConstantsFrom(const double* c) {
  return {static_cast<float>(c[0]),     static_cast<float>(1 - c[0]), static_cast<float>(c[1]),
          static_cast<float>(1 - c[1]), static_cast<float>(c[2]),     static_cast<float>(c[3])};
}

void Update(StepRule rule, const double* constants, const float* f, int64_t count, const UpdateRow* rows,
            const void* const* gradients, void* const* copies) {
  // Kept per thread, so that calls stop allocating once it fits the largest layer.
  thread_local std::vector<StepPart> parts;
  parts.resize(static_cast<size_t>(count));
  int64_t num_bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    parts[i] = PartOf(rows[i], gradients, copies);
    num_bytes += MovedBytes(parts[i], rule);
  }
  moved_bytes += num_bytes;
  const EmulatedTime updating(kHost, num_bytes);
  const StepFactors factors{f[0], f[1], f[2], f[3], f[4], f[5], f[6]};
  RunHostStep({rule, factors, ConstantsFrom(constants), parts.data(), count});
}

int64_t AllMovedBytes() { return moved_bytes; }

}  // namespace

}  // namespace jaxferry

int jaxferry_host_update(int rule, const double* constants, const float* factors, int64_t count, const int64_t* rows,
                         const void* const* gradients, void* const* copies) {
  try {
    jaxferry::Update(static_cast<jaxferry::StepRule>(rule), constants, factors, count,
                     reinterpret_cast<const jaxferry::UpdateRow*>(rows), gradients, copies);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

int64_t jaxferry_host_step_bytes() { return jaxferry::AllMovedBytes(); }
