// Calls functions on threads of their own: a callback goes on with an XLA program, perhaps for long, and the queue that
// it waited for has other copies to do. No XLA types.
#ifndef JAXFERRY_CPU_CALLBACKS_H_
#define JAXFERRY_CPU_CALLBACKS_H_

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace jaxferry {

// Threads are started while none is idle, kept, and detached: one that is held up inside XLA at exit holds up nothing
// but itself. So an object of this class is never destroyed.
class Callbacks {
 public:
  // Has the function called soon, after nothing else.
  void Post(std::function<void()> function);

  // Ends the idle threads and waits for the others, but no longer than this.
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
