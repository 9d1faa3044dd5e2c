// An optimizer step on host memory in one pass: reads a gradient of any dtype, updates fp32 master and moments in
// place, and writes the compute copy. A master is whole, or split into a bf16 compute copy and the bits that this lacks
// (split_master.h). Moments are fp32 or bf16. README.md defines the arithmetic. No XLA types.
//
// All instruction sets compute the same bits, except in NaNs: each operation is rounded separately (the library is
// compiled without fusing), and subnormal numbers are zero, as on XLA's own threads.
#ifndef JAXFERRY_CPU_HOST_STEP_H_
#define JAXFERRY_CPU_HOST_STEP_H_

#include <cstdint>

#include "common/dtypes.h"
#include "cpu/split_master.h"

namespace jaxferry {

enum class StepRule { kAdam = 0, kNadam = 1, kLion = 2, kSgd = 3, kMomentum = 4, kNesterov = 5 };

constexpr int64_t kNumStepRules = 6;

// The number of moments per master.
constexpr int64_t NumMoments(StepRule rule) {
  return rule == StepRule::kSgd ? 0 : rule == StepRule::kAdam || rule == StepRule::kNadam ? 2 : 1;
}

// Factors that change from step to step, in the order of the operand.
struct StepFactors {
  float unscale;   // multiplies gradients (inverse loss scale)
  float clip;      // then multiplies them too
  float rate;      // multiplies updates: minus the learning rate
  float decay;     // weight decay
  float first;     // bias correction of the first moment
  float gradient;  // Nadam's weight of the gradient
  float second;    // bias correction of the second moment
};

constexpr int64_t kNumStepFactors = sizeof(StepFactors) / sizeof(float);

// Constants: decays of the moments, their complements, and the epsilons.
struct StepConstants {
  float b1, one_minus_b1, b2, one_minus_b2, eps, eps_root;
};

// A parameter or a range of one, which starts at a multiple of 8 elements. Rules with fewer moments ignore the others.
struct StepPart {
  Dtype gradient_dtype, copy_dtype;
  const void* gradient;
  void* copy;
  float* master;
  SplitRest rest;  // if the master is split; `master` is null then
  Dtype moment_dtype;  // kFloat32 or kBfloat16
  void* first;
  void* second;
  int64_t size;
  bool decays;
  int64_t first_chunk;  // set by RunHostStep
};

struct HostStep {
  StepRule rule;
  StepFactors factors;
  StepConstants constants;
  uint32_t seed;  // of the step, for rounding moments to bf16
  StepPart* parts;
  int64_t num_parts;
};

// Runs the step of all parts on the threads of the process (host_threads.h).
void RunHostStep(const HostStep& step);

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_HOST_STEP_H_
