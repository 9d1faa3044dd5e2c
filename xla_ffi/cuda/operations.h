// The operations on a device; each issues a checked call's work to streams. No XLA types. All throw Failure.
#ifndef JAXFERRY_CUDA_OPERATIONS_H_
#define JAXFERRY_CUDA_OPERATIONS_H_

#include <cuda_runtime_api.h>

#include "common/calls.h"
#include "cuda/device.h"

namespace jaxferry::cuda {

void RunRead(const Copies& copies, cudaStream_t stream);
void RunStore(const Store& call, cudaStream_t stream);
void RunMatmul(Device& device, const Matmul& call, cudaStream_t stream);
void RunMatmulGradient(Device& device, const MatmulGradient& call, cudaStream_t stream);
// Find the algorithms of the calls' products, which lie at aligned addresses; pointers are ignored.
void PlanMatmul(Device& device, const Matmul& call);
void PlanMatmulGradient(Device& device, const MatmulGradient& call);
// Loads into arrays whose vacancy is noted wait for the last uses of these alone, where it has been seen for nothing,
// and else for all of the stream's work so far.
void RunFerryLoad(Device& device, const Copies& copies, Vacancy vacancy, cudaStream_t stream);
void RunFerryStore(Device& device, const Copies& copies, cudaStream_t stream);
void RunFerryWait(Device& device, const Ranges& ranges, cudaStream_t stream);
// Notes that no later work reads or writes these bytes until they are loaded again.
void RunFerryVacate(Device& device, const Ranges& ranges, cudaStream_t stream);
// Waits until the ferry's queues are empty on every device.
void SynchronizeFerry();
// Waits in the calling thread until all queued copies to or from these bytes have ended, on any device.
void AwaitFerry(const Ranges& ranges);

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_OPERATIONS_H_
