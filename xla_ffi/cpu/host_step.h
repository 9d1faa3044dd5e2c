// A step of an optimizer on host memory in one pass: a gradient of any dtype comes in, fp32 master and moments are
// updated in place, the compute copy goes out. README.md has the arithmetic. No XLA types.
//
// Every instruction set computes the same bits: each operation is rounded by itself (nothing is fused, and the library
// is compiled so), and subnormal numbers are zero, as on XLA's own threads. Of NaNs the bits may differ.
#ifndef JAXFERRY_CPU_HOST_STEP_H_
#define JAXFERRY_CPU_HOST_STEP_H_

#include <cstdint>

#include "common/dtypes.h"

namespace jaxferry {

enum class StepRule { kAdam = 0, kNadam = 1, kLion = 2, kSgd = 3, kMomentum = 4, kNesterov = 5 };

constexpr int64_t kNumStepRules = 6;

// Moments beside each master.
constexpr int64_t NumMoments(StepRule rule) {
  return rule == StepRule::kSgd ? 0 : rule == StepRule::kAdam || rule == StepRule::kNadam ? 2 : 1;
}

// What changes by step; in this order an operand of the operation.
struct StepFactors {
  float unscale;   // gradients are multiplied by it,
  float clip;      // then by this
  float rate;      // what updates are multiplied by before they are added: minus the learning rate
  float decay;     // weight decay
  float first;     // what the first moment is multiplied by for its bias
  float gradient;  // Nadam's share of the gradient
  float second;    // what the second moment is multiplied by for its bias
};

constexpr int64_t kNumStepFactors = sizeof(StepFactors) / sizeof(float);

// What is constant: decays of the moments, their complements, and what keeps quotients finite.
struct StepConstants {
  float b1, one_minus_b1, b2, one_minus_b2, eps, eps_root;
};

// A parameter, or a stretch of one. A rule with fewer moments leaves those that it has not alone.
struct StepPart {
  Dtype gradient_dtype, copy_dtype;
  const void* gradient;
  void* copy;
  float* master;
  float* first;
  float* second;
  int64_t size;
  bool decays;
  int64_t first_chunk;  // RunHostStep's own
};

struct HostStep {
  StepRule rule;
  StepFactors factors;
  StepConstants constants;
  StepPart* parts;
  int64_t num_parts;
};

// Runs the step of all parts on the threads of the process (host_threads.h).
void RunHostStep(const HostStep& step);

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_HOST_STEP_H_
