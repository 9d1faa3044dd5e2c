// The memory-bandwidth baseline of a host step: a loop with AdamW's reads and writes but hardly any arithmetic. Per
// parameter it reads and writes three fp32 arrays, reads one 16-bit array and writes another: 28 bytes, and 2 more
// because the cache also fetches the array that is only written.
//
// host_step.py compiles and loads it.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

struct Arrays {
  float *master, *first, *second;
  const uint16_t* gradient;
  uint16_t* copy;
};

void ReadAndWrite(const Arrays& arrays, int64_t start, int64_t end) {
  float* __restrict master = arrays.master;
  float* __restrict first = arrays.first;
  float* __restrict second = arrays.second;
  const uint16_t* __restrict gradient = arrays.gradient;
  uint16_t* __restrict copy = arrays.copy;
  for (int64_t i = start; i < end; ++i) {
    master[i] += 1;
    first[i] += 1;
    second[i] += 1;
    copy[i] = gradient[i];
  }
}

}  // namespace

// Returns the seconds of one of `repetitions` passes; each thread has its own range.
extern "C" double read_write(const Arrays* arrays, int64_t size, int64_t num_threads, int64_t repetitions) {
  const int64_t stretch = (size / num_threads + 63) / 64 * 64;
  const auto run = [&](int64_t thread) {
    const int64_t start = std::min(size, thread * stretch), end = std::min(size, start + stretch);
    for (int64_t i = 0; i < repetitions; ++i) ReadAndWrite(*arrays, start, end);
  };
  const auto before = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int64_t thread = 1; thread < num_threads; ++thread) threads.emplace_back(run, thread);
  run(0);
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - before;
  return elapsed.count() / static_cast<double>(repetitions);
}
