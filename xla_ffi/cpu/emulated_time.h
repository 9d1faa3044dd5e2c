// Emulates a link or a host's memory for operations that read or write host memory themselves.
#ifndef JAXFERRY_CPU_EMULATED_TIME_H_
#define JAXFERRY_CPU_EMULATED_TIME_H_

#include <chrono>
#include <cstdint>
#include <thread>

#include "cpu/ferry.h"

namespace jaxferry {

// Extends its scope to the time that the bytes would take on the link. Longer work is not slowed down, like a GPU
// kernel that reads ahead. The queues' copies are assumed to use the link in parallel.
class EmulatedTime {
 public:
  EmulatedTime(Direction direction, int64_t bytes) : end_(std::chrono::steady_clock::now()) {
    const double bytes_per_s = Ferry::Settings(direction).bytes_per_s.load();
    if (bytes_per_s <= 0) return;
    const std::chrono::duration<double> carried(static_cast<double>(bytes) / bytes_per_s);
    end_ += std::chrono::duration_cast<std::chrono::steady_clock::duration>(carried);
  }
  EmulatedTime(const EmulatedTime&) = delete;
  EmulatedTime& operator=(const EmulatedTime&) = delete;
  ~EmulatedTime() { std::this_thread::sleep_until(end_); }

 private:
  std::chrono::steady_clock::time_point end_;
};

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_EMULATED_TIME_H_
