// The threads of a block as fibers that take turns.
#include <cuda_runtime.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kWarpSize = 32;

enum class State { kRuns, kWaitsForBlock, kWaitsForWarp, kHasEnded };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  State state = State::kRuns;
};

std::vector<Fiber> fibers;
ucontext_t scheduler;
const std::function<void()>* body = nullptr;
unsigned exchanged[1024];

void Run() {
  (*body)();
  fibers[threadIdx.x].state = State::kHasEnded;
  // The context goes back to the scheduler by its link.
}

void Yield(State state) {
  const unsigned self = threadIdx.x;
  fibers[self].state = state;
  swapcontext(&fibers[self].context, &scheduler);
  threadIdx.x = self;
}

// Lets those of [begin, end) go on that wait, once all that have not ended do.
bool Release(unsigned begin, unsigned end, State waiting) {
  bool is_any = false;
  for (unsigned i = begin; i < end; ++i) {
    if (fibers[i].state == State::kHasEnded) continue;
    if (fibers[i].state != waiting) return false;
    is_any = true;
  }
  for (unsigned i = begin; i < end; ++i) {
    if (fibers[i].state == waiting) fibers[i].state = State::kRuns;
  }
  return is_any;
}

bool ReleaseAny(unsigned num_threads) {
  bool is_any = Release(0, num_threads, State::kWaitsForBlock);
  for (unsigned begin = 0; begin < num_threads; begin += kWarpSize) {
    const unsigned end = begin + kWarpSize < num_threads ? begin + kWarpSize : num_threads;
    is_any |= Release(begin, end, State::kWaitsForWarp);
  }
  return is_any;
}

void RunBlock(unsigned num_threads) {
  for (unsigned i = 0; i < num_threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.state = State::kRuns;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, Run, 0);
  }
  for (;;) {
    bool is_running = false;
    bool have_ended = true;
    for (unsigned i = 0; i < num_threads; ++i) {
      if (fibers[i].state == State::kRuns) {
        is_running = true;
        threadIdx.x = i;
        swapcontext(&scheduler, &fibers[i].context);
      }
      have_ended &= fibers[i].state == State::kHasEnded;
    }
    if (have_ended) return;
    if (!ReleaseAny(num_threads) && !is_running) {
      std::fprintf(stderr, "emulation: threads of a block wait for each other\n");
      std::abort();
    }
  }
}

}  // namespace

void __syncthreads() { Yield(State::kWaitsForBlock); }

// Returns what another thread of the warp gives.
static unsigned Exchange(unsigned given, unsigned other) {
  exchanged[threadIdx.x] = given;
  Yield(State::kWaitsForWarp);
  const unsigned found = exchanged[other];
  Yield(State::kWaitsForWarp);
  return found;
}

float __shfl_xor_sync(unsigned, float value, int lane_mask) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = Exchange(bits, threadIdx.x ^ static_cast<unsigned>(lane_mask));
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

int __shfl_sync(unsigned, int value, int lane) {
  const unsigned warp = threadIdx.x / kWarpSize * kWarpSize;
  return static_cast<int>(Exchange(static_cast<unsigned>(value), warp + static_cast<unsigned>(lane)));
}

unsigned __ballot_sync(unsigned, int predicate) {
  const unsigned warp = threadIdx.x / kWarpSize * kWarpSize;
  exchanged[threadIdx.x] = predicate != 0;
  Yield(State::kWaitsForWarp);
  unsigned found = 0;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) found |= exchanged[warp + lane] << lane;
  Yield(State::kWaitsForWarp);
  return found;
}

namespace emulation {

void RunGrid(unsigned num_blocks, unsigned num_threads, const std::function<void()>& thread) {
  if (fibers.size() < num_threads) fibers = std::vector<Fiber>(num_threads);
  body = &thread;
  gridDim = dim3(num_blocks);
  blockDim = dim3(num_threads);
  for (unsigned block = 0; block < num_blocks; ++block) {
    blockIdx.x = block;
    RunBlock(num_threads);
  }
}

}  // namespace emulation
