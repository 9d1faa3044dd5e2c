// The emulator for operations that read or write host memory themselves: they are as slow as a link, or a host.
#ifndef JAXFERRY_CPU_EMULATED_TIME_H_
#define JAXFERRY_CPU_EMULATED_TIME_H_

#include <chrono>
#include <cstdint>
#include <thread>

#include "cpu/ferry.h"

namespace jaxferry {

// While it lives, so many bytes cross: it does not end before they would have. Work that takes longer is not slowed, as a
// GPU's kernel that reads ahead is not. The queues' copies are taken to use a link beside it.
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
