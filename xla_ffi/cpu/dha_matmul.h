// Products with a weight, panel by panel. No XLA types.
#ifndef JAXFERRY_CPU_DHA_MATMUL_H_
#define JAXFERRY_CPU_DHA_MATMUL_H_

#include "common/calls.h"

namespace jaxferry {

void RunMatmul(const Matmul& call);

void RunMatmulGradient(const MatmulGradient& call);

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_DHA_MATMUL_H_
