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

// Puts copies in the place of what `call` points to, as far as there is room.
class NearbyTables {
 public:
  UEC_DEVICE NearbyTables(Nearby& nearby, std::byte* memory, int32_t num_ranks)
      : nearby_(nearby), at_(memory), num_ranks_(num_ranks) {
    used_ = round_up(int64_t{num_ranks} * kPeerBytes, 8);
    if (used_ > kNearbyBytes) used_ = num_ranks_ = 0;
  }

  // By all threads: copies what each call needs, the ranks' addresses and who is told of `open`.
  UEC_DEVICE void fill_peers(const RankState& known, const std::byte* call_block) {
    const auto* const bases = reinterpret_cast<const uint64_t*>(known.bases);
    const uint8_t* const opens =
        CallArrays::in(known.arrays.work.opens, reinterpret_cast<intptr_t>(call_block));
    for (int32_t r = ptx::thread_idx(); r < num_ranks_; r += ptx::num_threads()) {
      const uint64_t base = bases[r];
      const uint8_t is_told = opens[r];
      reinterpret_cast<uint64_t*>(at_)[r] = base;
      near_opens()[r] = is_told;
    }
  }

  // By one thread, as what follows. The other tables are filled by fill_nearby().
  UEC_DEVICE void take_peers(Call& call) {
    nearby_.num_tables = nearby_.most_words = 0;
    if (num_ranks_ == 0) return;
    call.addresses.bases = reinterpret_cast<uint8_t* const*>(at_);
    call.work.opens = near_opens();
  }

  UEC_DEVICE void replace(Call& call, const Capacity& capacity) {
    const int64_t segments = capacity.num_segments;
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
  static constexpr int64_t kPeerBytes = sizeof(uint64_t) + sizeof(uint8_t);

  UEC_DEVICE uint8_t* near_opens() const {
    return reinterpret_cast<uint8_t*>(at_ + num_ranks_ * sizeof(uint64_t));
  }

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
    const auto words = static_cast<int32_t>(bytes / sizeof(uint32_t));
    nearby_.tables[nearby_.num_tables++] = {reinterpret_cast<const uint32_t*>(table), copy, words};
    nearby_.most_words = max32(nearby_.most_words, words);
    table = reinterpret_cast<T*>(copy);
    used_ = round_up(used_ + bytes, 8);
  }

  Nearby& nearby_;
  std::byte* at_;
  int32_t num_ranks_;  // whose table has a copy
  int64_t used_;
};

// By all threads of a block, between two block-wide barriers. A word of each table is under way at
// once: most tables are shorter than the block has threads.
UEC_DEVICE void fill_nearby(const Nearby& nearby) {
  constexpr int32_t kMost = sizeof(nearby.tables) / sizeof(nearby.tables[0]);
#pragma unroll 1
  for (int32_t w = ptx::thread_idx(); w < nearby.most_words; w += ptx::num_threads()) {
    uint32_t words[kMost];
    uint32_t*
        to[kMost];  // kept, because the stores could change the tables for all a compiler knows
#pragma unroll
    for (int32_t i = 0; i < kMost; ++i) {
      const bool has_word = i < nearby.num_tables && w < nearby.tables[i].words;
      to[i] = has_word ? nearby.tables[i].to + w : nullptr;
      if (has_word) words[i] = nearby.tables[i].from[w];
    }
#pragma unroll
    for (int32_t i = 0; i < kMost; ++i)
      if (to[i] != nullptr) *to[i] = words[i];
  }
}

}  // namespace uec::cuda
