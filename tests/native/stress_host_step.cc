// The host step without XLA: every kernel against the portable one, many callers at once, a forked child, and the end.
#include "stress_host_step.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "cpu/host_step.h"
#include "cpu/host_step_kernels.h"
#include "cpu/host_sums.h"
#include "cpu/host_threads.h"

using namespace jaxferry;

#define EXPECT(condition)                                                             \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::fprintf(stderr, "host step, line %d: %s does not hold\n", __LINE__, #condition); \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (false)

namespace {

// A layer of parameters of these sizes, in vectors that hold no element more, so that sanitizers see each one too many.
struct Layer {
  Layer(Dtype dtype, const std::vector<int64_t>& sizes, unsigned seed) : dtype(dtype), sizes(sizes) {
    std::mt19937 random(seed);
    int64_t total = 0;
    for (const int64_t size : sizes) total += size;
    gradient.resize(total * ItemSize(dtype));
    copy.resize(total * ItemSize(dtype));
    for (char& byte : gradient) byte = static_cast<char>(random() % 64);  // no NaN in any dtype
    for (const int64_t size : sizes) {
      for (std::vector<std::vector<float>>* arrays : {&masters, &first, &second}) {
        std::vector<float>& array = arrays->emplace_back(size);
        for (float& number : array) number = static_cast<float>(random() % 1000) / 500;
      }
    }
  }

  void Step(StepRule rule) {
    std::vector<StepPart> parts;
    int64_t offset = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const bool is_split = !rests.empty(), has_codes = !codes.empty();
      void* const moments[] = {has_codes ? static_cast<void*>(codes[2 * i].data()) : first[i].data(),
                               has_codes ? static_cast<void*>(codes[2 * i + 1].data()) : second[i].data()};
      parts.push_back({dtype, dtype, Skip(dtype, static_cast<const void*>(gradient.data()), offset), CopyAt(offset),
                       is_split ? nullptr : masters[i].data(), is_split ? RestOf(i) : SplitRest{},
                       has_codes ? kCode : Dtype::kFloat32, moments[0], moments[1], first[i].data(),
                       second[i].data(), sizes[i], i % 2 == 0, 0});
      offset += sizes[i];
    }
    RunHostStep({rule,
                 {0.5f, 0.25f, -0.01f, 0.1f, 10.0f, 0.5f, 100.0f},
                 {0.9f, 0.1f, 0.99f, 0.01f, 1e-8f, 1e-12f},
                 0,
                 parts.data(),
                 static_cast<int64_t>(parts.size())});
  }

  // Makes the moments codes, of zeros; `first` and `second` have their scales then.
  void UseCodes() {
    for (size_t i = 0; i < sizes.size(); ++i) {
      for (std::vector<float>* scales : {&first[i], &second[i]}) {
        scales->assign(NumMomentBlocks(sizes[i]), 0.0f);
        codes.emplace_back(sizes[i]);
      }
    }
  }

  // Splits the masters; returns whether that is exact.
  bool Split() {
    bool is_exact = true;
    int64_t offset = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      CastOnHost(Dtype::kFloat32, masters[i].data(), dtype, CopyAt(offset), sizes[i]);
      rests.emplace_back(sizes[i] + (sizes[i] + 15) / 16);
      is_exact &= SplitMasters(masters[i].data(), static_cast<const uint16_t*>(CopyAt(offset)), sizes[i], RestOf(i));
      std::fill(masters[i].begin(), masters[i].end(), 0.0f);
      offset += sizes[i];
    }
    return is_exact;
  }

  void Join() {
    int64_t offset = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const SplitRest rest = RestOf(i);
      JoinMasters(static_cast<const uint16_t*>(CopyAt(offset)), rest.low, rest.up, sizes[i], masters[i].data());
      offset += sizes[i];
    }
    rests.clear();
  }

  void* CopyAt(int64_t offset) { return Skip(dtype, static_cast<void*>(copy.data()), offset); }
  SplitRest RestOf(size_t i) { return RestAt(rests[i].data(), sizes[i]); }

  bool operator==(const Layer& other) const {
    return masters == other.masters && first == other.first && second == other.second && codes == other.codes &&
           copy == other.copy;
  }

  Dtype dtype;
  std::vector<int64_t> sizes;
  std::vector<char> gradient, copy;
  std::vector<std::vector<float>> masters, first, second;
  std::vector<std::vector<uint8_t>> codes;    // of both moments of each parameter, or none
  std::vector<std::vector<uint16_t>> rests;  // of masters that are split; then `masters` are zeros
};

constexpr int64_t kLarge = (int64_t{1} << 15) + 3;  // more than one chunk
constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16};

void TestEveryKernelAndNumberOfThreadsGivesTheSameBits() {
  for (const Dtype dtype : kDtypes) {
    const Layer initial(dtype, {1, 0, 17, kLarge, 33, 3 * kLarge, 5}, 1);
    for (int64_t rule = 0; rule < kNumStepRules; ++rule) {
      Layer expected = initial;
      SetSimd(Simd::kPortable);
      HostThreads::SetNumThreads(1);
      expected.Step(static_cast<StepRule>(rule));
      for (int simd = 0; simd <= static_cast<int>(BestSimd()); ++simd) {
        for (const int64_t num_threads : {1, 2, 5}) {
          Layer layer = initial;
          SetSimd(static_cast<Simd>(simd));
          HostThreads::SetNumThreads(num_threads);
          layer.Step(static_cast<StepRule>(rule));
          EXPECT(layer == expected);
        }
      }
    }
  }
}

void TestCodesOfMomentsAreTheSameForEveryKernelAndNumberOfThreads() {
  Layer initial(Dtype::kBfloat16, {1, 0, 17, kLarge, 255, 256, 257, 3 * kLarge, 5}, 2);
  initial.UseCodes();
  for (const StepRule rule : {StepRule::kAdam, StepRule::kNadam}) {
    Layer expected = initial;
    SetSimd(Simd::kPortable);
    HostThreads::SetNumThreads(1);
    for (int step = 0; step < 3; ++step) expected.Step(rule);
    for (int simd = 0; simd <= static_cast<int>(BestSimd()); ++simd) {
      for (const int64_t num_threads : {1, 2, 5}) {
        Layer layer = initial;
        SetSimd(static_cast<Simd>(simd));
        HostThreads::SetNumThreads(num_threads);
        for (int step = 0; step < 3; ++step) layer.Step(rule);
        EXPECT(layer == expected && layer.codes != initial.codes);
      }
    }
  }
}

void TestSplitMastersTakeTheSameSteps() {
  const Layer initial(Dtype::kBfloat16, {1, 0, 4, 17, kLarge, 24, 33, 3 * kLarge, 5}, 3);
  for (int simd = 0; simd <= static_cast<int>(BestSimd()); ++simd) {
    SetSimd(static_cast<Simd>(simd));
    for (const int64_t num_threads : {1, 5}) {
      HostThreads::SetNumThreads(num_threads);
      Layer expected = initial, layer = initial;
      EXPECT(layer.Split());
      for (int step = 0; step < 3; ++step) {
        expected.Step(StepRule::kAdam);
        layer.Step(StepRule::kAdam);
      }
      layer.Join();
      EXPECT(layer == expected);
    }
  }
}

void TestManyCallersAtOnceDoTheirOwnWork() {
  constexpr int kNumCallers = 5, kNumSteps = 20;
  std::atomic<bool> is_over{false};
  std::thread changes_threads([&] {
    for (int64_t i = 0; !is_over; ++i) {
      HostThreads::SetNumThreads(1 + i % 4);
      std::this_thread::yield();
    }
  });
  std::vector<Layer> layers, expected;
  for (unsigned i = 0; i < kNumCallers; ++i) layers.emplace_back(Dtype::kBfloat16, std::vector{3 * kLarge, kLarge}, i);
  expected = layers;
  std::vector<std::thread> callers;
  for (Layer& layer : layers) {
    callers.emplace_back([&layer] {
      for (int step = 0; step < kNumSteps; ++step) layer.Step(StepRule::kAdam);
    });
  }
  for (std::thread& caller : callers) caller.join();
  is_over = true;
  changes_threads.join();
  HostThreads::SetNumThreads(1);
  for (unsigned i = 0; i < kNumCallers; ++i) {
    for (int step = 0; step < kNumSteps; ++step) expected[i].Step(StepRule::kAdam);
    EXPECT(layers[i] == expected[i]);
  }
}

void TestEveryChunkIsDoneOnce() {
  HostThreads::SetNumThreads(4);
  HostThreads threads;
  for (const int64_t num_chunks : {0, 1, 2, 3, 100, 10000}) {
    std::vector<std::atomic<int>> counts(num_chunks);
    const auto count = [](const void* job, int64_t chunk) {
      ++(*static_cast<std::vector<std::atomic<int>>*>(const_cast<void*>(job)))[chunk];
    };
    threads.Run(count, &counts, num_chunks);
    for (const std::atomic<int>& number : counts) EXPECT(number == 1);
    if (num_chunks == 100) threads.Stop();  // callers go on alone
  }
}

// Whoever calls: XLA's threads take them for zero by themselves, and threads that those start do.
void TestSubnormalNumbersAreZero() {
  HostThreads::SetNumThreads(2);
  Layer layer(Dtype::kFloat32, {4 * kLarge}, 1);
  const float subnormal = 1e-39f;
  std::memset(layer.gradient.data(), 0, layer.gradient.size());
  for (std::vector<float>* array : {&layer.masters[0], &layer.first[0], &layer.second[0]}) {
    std::fill(array->begin(), array->end(), subnormal);
  }
  for (int simd = 0; simd <= static_cast<int>(BestSimd()); ++simd) {
    SetSimd(static_cast<Simd>(simd));
    Layer stepped = layer;
    stepped.Step(StepRule::kAdam);
    for (const std::vector<float>* array : {&stepped.masters[0], &stepped.first[0], &stepped.second[0]}) {
      EXPECT(std::count(array->begin(), array->end(), 0.0f) == static_cast<int64_t>(array->size()));
    }
  }
  volatile float still_there = subnormal;
  EXPECT(still_there * 0.5f > 0);  // and the caller does as before
}

// Thread sanitizer lets no forked child start threads.
void TestAForkedChildHasThreadsOfItsOwn() {
#ifndef __SANITIZE_THREAD__
  HostThreads::SetNumThreads(3);
  Layer layer(Dtype::kFloat32, {5 * kLarge}, 1), expected = layer;
  layer.Step(StepRule::kAdam);
  const pid_t child = fork();
  if (child == 0) {
    expected.Step(StepRule::kAdam);
    _exit(expected == layer ? 0 : 1);
  }
  int status = -1;
  EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

}  // namespace

void TestHostStep() {
  TestEveryKernelAndNumberOfThreadsGivesTheSameBits();
  TestCodesOfMomentsAreTheSameForEveryKernelAndNumberOfThreads();
  TestSplitMastersTakeTheSameSteps();
  TestManyCallersAtOnceDoTheirOwnWork();
  TestEveryChunkIsDoneOnce();
  TestSubnormalNumbersAreZero();
  TestAForkedChildHasThreadsOfItsOwn();
}
