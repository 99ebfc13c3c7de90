// Copies in shared memory of what a block looks up for each group and each tile.
//
// An acquire at system scope empties the first-level cache. Without the copies every one of a chain
// of dependent look-ups would go to the second-level cache again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device/block.hpp"
#include "cuda/device/ptx.cuh"

namespace uec::cuda {

// By one thread: puts copies in the place of what `call` points to, as far as there is room. They
// have to be filled before they are used.
class NearbyTables {
 public:
  UEC_DEVICE NearbyTables(Nearby& nearby, std::byte* memory) : nearby_(nearby), at_(memory) {
    nearby.num_tables = 0;
  }

  UEC_DEVICE void replace(Call& call, const Capacity& capacity) {
    const int64_t segments = capacity.num_segments;
    keep(call.addresses.bases, call.num_ranks);
    keep(call.addresses.slot_offset, segments);
    keep(call.addresses.segment_bytes, segments);
    keep(call.addresses.region_offset, segments);
    keep(call.addresses.mains, segments * capacity.num_mains);
    if (call.addresses.regions != nullptr) keep(call.addresses.regions, call.num_ranks);
    keep_tiles(call);
    keep(call.work.tasks, call.work.num_tasks);
    keep(call.work.pieces, call.work.num_pieces);
    keep(call.work.destinations, call.work.num_destinations);
  }

  // The same for a reduction, which reads no slots of weights.
  UEC_DEVICE void replace_reduction(Call& call, const Capacity& capacity) {
    const int32_t segments = call.grads.num_segments;
    keep(call.addresses.bases, call.num_ranks);
    keep(call.addresses.mains, int64_t{segments} * capacity.num_mains);
    keep(call.grads.bytes, segments);
    keep(call.grads.type, segments);
    keep(call.grads.offset, segments);
    keep(call.main_type, segments);
    keep_tiles(call);
    keep(call.work.destinations, call.work.num_destinations);
    keep(call.work.reductions, call.work.num_reductions);
    keep(call.work.expected, call.work.num_expected);
  }

 private:
  UEC_DEVICE void keep_tiles(Call& call) {
    keep(call.tiles.bytes, call.tiles.num_segments);
    keep(call.tiles.first_tile, call.tiles.num_segments + 1);
    keep(call.tiles.segment, call.tiles.num_segments);
  }

  template <class T>
  UEC_DEVICE void keep(T*& table, int64_t count) {
    static_assert(sizeof(T) % sizeof(uint32_t) == 0);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (used_ + bytes > kNearbyBytes) return;
    auto* const copy = reinterpret_cast<uint32_t*>(at_ + used_);
    nearby_.tables[nearby_.num_tables++] = {reinterpret_cast<const uint32_t*>(table), copy,
                                            static_cast<int32_t>(bytes / sizeof(uint32_t))};
    table = reinterpret_cast<T*>(copy);
    used_ = round_up(used_ + bytes, 8);
  }

  Nearby& nearby_;
  std::byte* at_;
  int64_t used_ = 0;
};

// By all threads of a block, between two block-wide barriers.
UEC_DEVICE void fill_nearby(const Nearby& nearby) {
  for (int32_t i = 0; i < nearby.num_tables; ++i) {
    const auto& [from, to, words] = nearby.tables[i];
    for (int32_t w = ptx::thread_idx(); w < words; w += ptx::num_threads()) to[w] = from[w];
  }
}

}  // namespace uec::cuda
