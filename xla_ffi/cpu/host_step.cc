#include "cpu/host_step.h"

#include <algorithm>

#include "cpu/denormals.h"
#include "cpu/host_step_kernels.h"
#include "cpu/host_threads.h"

namespace jaxferry {

namespace {

// Large enough that threads rarely contend, small enough that they finish together; whole cache lines of every array
// and blocks of moments.
constexpr int64_t kStepChunk = 1 << 15;

static_assert(kStepChunk % kMomentBlock == 0);

struct StepJob {
  const HostStep& step;
  StepKernel kernel;
};

void RunChunk(const void* data, int64_t chunk) {
  const StepJob& job = *static_cast<const StepJob*>(data);
  const StepPart *begin = job.step.parts, *end = begin + job.step.num_parts;
  const auto starts_later = [](int64_t number, const StepPart& part) { return number < part.first_chunk; };
  const StepPart& part = *(std::upper_bound(begin, end, chunk, starts_later) - 1);
  const int64_t start = (chunk - part.first_chunk) * kStepChunk;
  const DenormalsAreZero denormals_are_zero;
  job.kernel(job.step, part.From(start, std::min(kStepChunk, part.size - start)));
}

}  // namespace

void RunHostStep(const HostStep& step) {
  int64_t num_chunks = 0, num_elements = 0;
  for (int64_t i = 0; i < step.num_parts; ++i) {
    step.parts[i].first_chunk = num_chunks;
    num_chunks += (step.parts[i].size + kStepChunk - 1) / kStepChunk;
    num_elements += step.parts[i].size;
  }
  const StepJob job{step, CurrentStepKernel()};
  // A layer of many small parameters has many chunks and little work.
  HostThreads::Get().Run(RunChunk, &job, num_chunks, (num_elements + kStepChunk - 1) / kStepChunk);
}

}  // namespace jaxferry
