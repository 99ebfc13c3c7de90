// Where everything lies in a rank's symmetric memory: the one table of offsets.
//
// Every flag has one writer in any epoch and lives at the rank that waits for it. `call`, `open`,
// `done` and `consumed` entries are padded so that two writers never share a cache line.
#pragma once

#include "core/base/common.hpp"
#include "core/transfer/gradients.hpp"

namespace uec {

inline constexpr int64_t kFlagLine = 128;
inline constexpr int64_t kSlotAlign = 4096;
inline constexpr int64_t kSegmentAlign = 256;

// Where the slots of each segment lie in memory that has room for `num_local_experts` experts
// directly before them, from `at` on: pages of `align` bytes hold either the slots of one segment,
// or no slots. So the pages of slots can appear behind other local experts too. Returns the end.
UEC_HD inline int64_t place_instances(int32_t num_segments, const int64_t* segment_bytes,
                                      int64_t num_local_experts, int64_t slots, int64_t align,
                                      int64_t at, int64_t* slot_offset) {
  at = round_up(at, align);
  for (int32_t i = 0; i < num_segments; ++i) {
    slot_offset[i] = round_up(at + num_local_experts * segment_bytes[i], align);
    at = round_up(slot_offset[i] + slots * segment_bytes[i], align);
  }
  return at;
}

struct SymmetricLayout {
  int32_t num_ranks = 0;
  int32_t slots_per_rank = 0;
  int64_t max_groups = 0;
  int64_t max_grad_groups = 0;
  int64_t sums_bytes = 0;

  int64_t doorbell = 0;       // host engine: futex word and the number of its sleepers
  int64_t call_base = 0;      // [G] call records, padded
  int64_t open_base = 0;      // [G] padded
  int64_t done_base = 0;      // [S][G] padded
  int64_t ready_base = 0;     // [S][max_groups]
  int64_t pulled_base = 0;    // [M + S][G]
  int64_t abort_base = 0;     // [G]
  int64_t gathered_base = 0;  // [G]
  int64_t load_base = 0;      // [G][E] int32
  int64_t summed_base = 0;    // [M][max_grad_groups]
  int64_t consumed_base = 0;  // [S][G] padded
  int64_t slots_base = 0;     // from here on: slots, their gradients, and room for local experts
  int64_t sums_base = 0;      // [S] fp32 sums, each of sums_bytes
  int64_t total = 0;

  // `slot_offset` [banks][segments] receives where the slots of each bank begin: [S] dense copies
  // of one expert's bytes. `grad_offset` [grad_banks][grad segments] receives the same for the
  // slots' gradients. `max_local_experts` is the largest number of local experts on a rank. With
  // `instance_align` (0: none is wanted) each of these lies as place_instances() says, with room
  // for so many local experts.
  UEC_HD static SymmetricLayout make(const Topology& t, int32_t max_local_experts,
                                     int64_t max_groups, int32_t num_segments,
                                     const int64_t* segment_bytes, int64_t* slot_offset,
                                     const Gradients& grads = {}, int64_t tile_bytes = 1,
                                     int64_t* grad_offset = nullptr, int32_t num_banks = 1,
                                     int32_t num_grad_banks = 1, int64_t instance_align = 0) {
    SymmetricLayout l;
    l.num_ranks = t.num_ranks;
    l.slots_per_rank = t.slots_per_rank;
    l.max_groups = max_groups;
    const int64_t ranks = t.num_ranks, slots = t.slots_per_rank;
    int64_t at = 0;
    const auto take = [&at](int64_t bytes, int64_t align) {
      at = round_up(at, align);
      const int64_t offset = at;
      at += bytes;
      return offset;
    };
    l.doorbell = take(kFlagLine, kFlagLine);
    l.call_base = take(ranks * kFlagLine, kFlagLine);
    l.open_base = take(ranks * kFlagLine, kFlagLine);
    l.done_base = take(slots * ranks * kFlagLine, kFlagLine);
    l.ready_base = take(slots * max_groups * 8, kFlagLine);
    l.pulled_base = take((max_local_experts + slots) * ranks * 8, kFlagLine);
    l.abort_base = take(ranks * 8, kFlagLine);
    l.gathered_base = take(ranks * 8, kFlagLine);
    l.load_base = take(ranks * t.num_experts * 4, kFlagLine);
    int64_t grad_tiles = 0;
    bool sums_apart = false;
    for (int32_t i = 0; i < grads.num_segments; ++i) {
      grad_tiles += ceil_div(grads.bytes[i], tile_bytes);
      sums_apart |= grads.type[i] != GradType::kFloat32;
    }
    l.max_grad_groups = uec::max_grad_groups(grad_tiles, tile_bytes);
    l.sums_bytes = sums_apart ? uec::sums_bytes(grad_tiles, tile_bytes) : 0;
    l.summed_base = take(max_local_experts * l.max_grad_groups * 8, kFlagLine);
    l.consumed_base = take(grads.num_segments > 0 ? slots * ranks * kFlagLine : 0, kFlagLine);
    l.slots_base = take(0, kSlotAlign);
    const auto place = [&](int32_t count, const int64_t* bytes, int32_t sets, int64_t* offset) {
      if (instance_align > 0) {
        for (int64_t b = 0; b < sets; ++b)
          at = place_instances(count, bytes, max_local_experts, slots, instance_align, at,
                               offset + b * count);
        return;
      }
      for (int32_t i = 0; i < count; ++i) {
        const int64_t begin = take(sets * slots * bytes[i], kSegmentAlign);
        for (int64_t b = 0; b < sets; ++b) offset[b * count + i] = begin + b * slots * bytes[i];
      }
    };
    place(num_segments, segment_bytes, num_banks, slot_offset);
    place(grads.num_segments, grads.bytes, num_grad_banks, grad_offset);
    l.sums_base = take(slots * l.sums_bytes, kSegmentAlign);
    l.total = round_up(at, kSlotAlign);
    return l;
  }

  UEC_HD int64_t call(int32_t writer) const { return call_base + writer * kFlagLine; }
  UEC_HD int64_t open(int32_t writer) const { return open_base + writer * kFlagLine; }
  UEC_HD int64_t done(int32_t slot, int32_t sender) const {
    return done_base + (static_cast<int64_t>(slot) * num_ranks + sender) * kFlagLine;
  }
  UEC_HD int64_t ready(int32_t slot, int64_t group) const {
    return ready_base + (slot * max_groups + group) * 8;
  }
  // `source_idx`: of what was read; see source_idx(). Slots' flags come first.
  UEC_HD int64_t pulled(int32_t source_idx, int32_t hub) const {
    return pulled_base + (int64_t{source_idx + slots_per_rank} * num_ranks + hub) * 8;
  }
  UEC_HD int64_t summed(int32_t local_idx, int64_t group) const {
    return summed_base + (local_idx * max_grad_groups + group) * 8;
  }
  UEC_HD int64_t consumed(int32_t slot, int32_t reader) const {
    return consumed_base + (static_cast<int64_t>(slot) * num_ranks + reader) * kFlagLine;
  }
  UEC_HD int64_t sums(int32_t slot) const { return sums_base + slot * sums_bytes; }
  UEC_HD int64_t abort(int32_t writer) const { return abort_base + writer * 8; }
  UEC_HD int64_t gathered(int32_t writer) const { return gathered_base + writer * 8; }
  UEC_HD int64_t load(int32_t writer, int32_t num_experts) const {
    return load_base + static_cast<int64_t>(writer) * num_experts * 4;
  }
};

}  // namespace uec
