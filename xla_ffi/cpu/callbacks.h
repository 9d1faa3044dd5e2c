// Calls functions on separate threads: a callback may continue an XLA program for a long time, while the queue must go
// on copying. No XLA types.
#ifndef JAXFERRY_CPU_CALLBACKS_H_
#define JAXFERRY_CPU_CALLBACKS_H_

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace jaxferry {

// A thread is started if none is idle, then kept and detached, so that a thread stuck inside XLA cannot block the exit.
// An object of this class is therefore never destroyed.
class Callbacks {
 public:
  // Calls the function soon, without waiting for other callbacks.
  void Post(std::function<void()> function);

  // Ends the idle threads and waits for the others, at most this long.
  void Stop(std::chrono::milliseconds patience);

 private:
  void Work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> functions_;
  int num_threads_ = 0, num_idle_ = 0;
  bool is_stopped_ = false;
};

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_CALLBACKS_H_
