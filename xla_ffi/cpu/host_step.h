// An optimizer step on host memory in one pass: reads a gradient of any dtype, updates fp32 master and moments in
// place, and writes the compute copy. A master is whole, split into a bf16 compute copy and the bits that this lacks
// (split_master.h), or in bf16, where the copy can be the master. Moments are fp32, bf16, or two of codes in blocks with scales. README.md defines the arithmetic. No
// XLA types.
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

// Elements that share a scale if moments are codes.
constexpr int64_t kMomentBlock = 256;

constexpr int64_t NumMomentBlocks(int64_t size) { return (size + kMomentBlock - 1) / kMomentBlock; }

// A parameter or a range of one, which starts at a multiple of 8 elements, of a block if moments are codes. Rules with
// fewer moments ignore the others.
struct StepPart {
  Dtype gradient_dtype, copy_dtype;
  const void* gradient;
  void* copy;
  float* master;
  SplitRest rest;  // if `master` is null: what the copy lacks of it, nothing of one in bf16
  bool rounds_master;  // to bf16, up or down at random
  Dtype moment_dtype;  // not kFloat16
  void* first;
  void* second;
  float* first_scale;  // of each block
  float* second_scale;
  int64_t size;
  bool decays;
  int64_t first_chunk;  // set by RunHostStep

  StepPart From(int64_t start, int64_t range_size) const {
    StepPart range = *this;
    range.gradient = Skip(gradient_dtype, gradient, start);
    range.copy = Skip(copy_dtype, copy, start);
    if (master != nullptr) range.master += start;
    if (rest.low != nullptr) range.rest = rest.From(start);
    if (first != nullptr) range.first = Skip(moment_dtype, first, start);
    if (second != nullptr) range.second = Skip(moment_dtype, second, start);
    if (moment_dtype == kCode) {
      range.first_scale += start / kMomentBlock;
      range.second_scale += start / kMomentBlock;
    }
    range.size = range_size;
    return range;
  }
};

struct HostStep {
  StepRule rule;
  StepFactors factors;
  StepConstants constants;
  uint32_t seed;  // of the step, for rounding moments
  StepPart* parts;
  int64_t num_parts;
};

// Runs the step of all parts on the threads of the process (host_threads.h).
void RunHostStep(const HostStep& step);

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_HOST_STEP_H_
