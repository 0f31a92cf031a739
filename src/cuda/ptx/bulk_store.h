// Copies from shared to global memory that the tensor memory accelerator (TMA) makes while the thread goes on. PTX ISA,
// 9.7.9.27.1.3 (cp.async.bulk.tensor).
#pragma once
#include <cuda.h>

#include <cstdint>

namespace octet::cuda::ptx {

// Starts the copy of a box to a tensor [column, row, head, batch]; elements beyond the tensor are left out. L2 evicts
// the written lines first.
__device__ inline void bulk_store(const CUtensorMap& map, int column, int row, int head, int batch, uint32_t from) {
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2, %3, %4}], [%5], "
      "policy;\n}" ::"l"(&map),
      "r"(column), "r"(row), "r"(head), "r"(batch), "r"(from)
      : "memory");
}
// Closes the group of all copies that this thread has started since the last call.
__device__ inline void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all copies of this thread have read shared memory.
__device__ inline void bulk_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until all copies of this thread are complete.
__device__ inline void bulk_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace octet::cuda::ptx
