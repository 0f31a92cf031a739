// The CPU kernels of one instruction set: compiled once for each, in a namespace of its own so that no function
// compiled for one can stand in for another's.
#include "cpu/attention/bwd/launch.h"
#include "cpu/attention/fwd/launch.h"
#include "cpu/attention/jvp/jvp.h"

namespace octet::cpu {

#define OCTET_CONCAT(a, b) a##b
#define OCTET_TABLE(isa) OCTET_CONCAT(kernels_, isa)

extern const Kernels OCTET_TABLE(OCTET_ISA);
const Kernels OCTET_TABLE(OCTET_ISA) = {
    OCTET_ISA::forward_block_rows, OCTET_ISA::forward_workspace, OCTET_ISA::forward, OCTET_ISA::backward_workspace,
    OCTET_ISA::backward,           OCTET_ISA::jvp_workspace,     OCTET_ISA::jvp,
};

}  // namespace octet::cpu
