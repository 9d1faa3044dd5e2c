#include "cpu/callbacks.h"

#include <system_error>
#include <thread>
#include <utility>

namespace jaxferry {

void Callbacks::Post(std::function<void()> function) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopped_) return;
    functions_.push_back(std::move(function));
    if (num_idle_ >= static_cast<int>(functions_.size())) {
      changed_.notify_all();
      return;
    }
    try {
      std::thread([this] { Work(); }).detach();
      ++num_threads_;
      return;
    } catch (const std::system_error&) {
      // No thread can be started: a busy one calls the function later, or this thread if there is none.
      if (num_threads_ > 0) return;
      function = std::move(functions_.back());
      functions_.pop_back();
    }
  }
  function();
}

void Callbacks::Stop(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  is_stopped_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, patience, [&] { return num_threads_ == 0; });
}

void Callbacks::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    ++num_idle_;
    changed_.wait(lock, [&] { return !functions_.empty() || is_stopped_; });
    --num_idle_;
    if (is_stopped_) break;
    std::function<void()> function = std::move(functions_.front());
    functions_.pop_front();
    lock.unlock();
    function();
    function = nullptr;
    lock.lock();
  }
  --num_threads_;
  changed_.notify_all();
}

}  // namespace jaxferry
