// Threads that share the chunks of a job in host memory and sleep between jobs. No XLA types.
//
//   Run(chunks) --> the caller takes chunks, one after another; idle threads take the others
//
// Several callers may run jobs at once; each continues its own job, with or without helpers. No allocation per job.
#ifndef JAXFERRY_CPU_HOST_THREADS_H_
#define JAXFERRY_CPU_HOST_THREADS_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace jaxferry {

class HostThreads {
 public:
  using Work = void (*)(const void* job, int64_t chunk);

  // Returns the process's instance; a forked child gets its own.
  static HostThreads& Get();

  // Calls `work(job, chunk)` once for each chunk in [0, num_chunks), on the caller and on idle threads, and waits for
  // all of them. No more than `max_threads` work on it, the caller among them: to wake one costs more than little work.
  void Run(Work work, const void* job, int64_t num_chunks, int64_t max_threads);
  void Run(Work work, const void* job, int64_t num_chunks) { Run(work, job, num_chunks, num_chunks); }

  // Ends the threads; running and later jobs are done by their callers alone.
  void Stop();

  // The maximum number of threads per job, including its caller.
  static int64_t NumThreads();

  // Sets that number; 0 for the value of JAXFERRY_HOST_THREADS, by default the CPUs that the process may use.
  static void SetNumThreads(int64_t count);

 private:
  struct Job {
    Work work;
    const void* data;
    int64_t num_chunks;
    int64_t num_helpers_wanted;
    std::atomic<int64_t> next{0};
    int64_t num_helpers = 0;
    Job* following = nullptr;
  };

  static void Take(Job& job);
  Job* FindJob();
  void Remove(Job& job);
  bool StartThreads(int64_t count);
  void Help();

  std::mutex mutex_;
  std::condition_variable posted_, done_;
  Job* first_ = nullptr;  // the jobs that still want helpers
  std::vector<std::thread> threads_;
  bool is_stopped_ = false;
};

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_HOST_THREADS_H_
