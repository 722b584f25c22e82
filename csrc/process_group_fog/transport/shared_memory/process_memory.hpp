// Reading the memory of another process of the same host.
#pragma once

#include <cstddef>

namespace fog::shared_memory {

// Copies `bytes` at address `from` of process `pid` to `to`, in one pass and without the other process's help (Linux's
// process_vm_readv). Returns 0, or the errno: ESRCH if the process has ended, EPERM if the system forbids it.
int read_process_memory(int pid, const void* from, void* to, size_t bytes);

// Where the Yama security module lets a process be read by its ancestors only (kernel.yama.ptrace_scope = 1), permits it to the
// other descendants of this process's parent: the ranks that one launcher has started. Elsewhere does nothing.
void permit_siblings_to_read();

} // namespace fog::shared_memory
