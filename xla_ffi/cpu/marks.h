// Start and end of programs and copies, by the host's clock. No XLA types.
#ifndef JAXFERRY_CPU_MARKS_H_
#define JAXFERRY_CPU_MARKS_H_

#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>

#include "common/mark_lists.h"

namespace jaxferry {

using Clock = std::chrono::steady_clock;

// The time on the clock of Python's time.perf_counter().
inline double Seconds(Clock::time_point time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); }

// NaN until known.
struct Times {
  std::atomic<double> start_s{NAN}, end_s{NAN};
};

class Marks {
 public:
  static Marks& Get() {
    static Marks* marks = new Marks;
    return *marks;
  }

  // Work from now on starts no earlier; recorded only if some list of marks is open.
  void NoteEndOfWait() {
    if (lists.IsAnyOpen()) last_s_ = Seconds(Clock::now());
  }

  // A program has ended; it started at the end of the previous program or of the last wait.
  void AddProgram(const void* token) {
    auto times = std::make_shared<Times>();
    const double end_s = Seconds(Clock::now());
    times->start_s = last_s_.exchange(end_s);
    times->end_s = end_s;
    lists.Add(token, std::move(times));
  }

  MarkLists<std::shared_ptr<Times>> lists;

 private:
  std::atomic<double> last_s_{NAN};
};

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_MARKS_H_
