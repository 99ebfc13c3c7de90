// Copies that bypass the caches.
#pragma once

#include <cstdint>

namespace uec::host {

// Copies bytes with non-temporal stores where the processor has them. Such stores are not ordered
// by a later release store: call store_fence() on the same thread before publishing.
void stream_copy(void* destination, const void* source, int64_t bytes);

// Clears bytes likewise.
void stream_zero(void* destination, int64_t bytes);

// Makes this thread's earlier stream_copy() and stream_zero() calls visible before its later
// stores.
void store_fence();

}  // namespace uec::host
