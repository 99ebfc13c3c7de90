#include "engine/config.hpp"

#include <algorithm>
#include <set>

#include "core/base/digest.hpp"
#include "core/schedule/tiles.hpp"

namespace uec {

uint64_t EngineConfig::initial_digest() const {
  uint64_t d = mix(num_experts, slots_per_rank);
  d = digest_ints(SingleThread{}, d, home.data(), static_cast<int64_t>(home.size()));
  d = digest_ints(SingleThread{}, d, domain.data(), static_cast<int64_t>(domain.size()));
  for (const int64_t bytes : segment_bytes) d = mix(d, bytes);
  for (size_t i = 0; i < grad_bytes.size(); ++i)
    d = mix(d, grad_bytes[i] << 1 | static_cast<int64_t>(grad_type[i]));
  d = mix(mix(d, num_banks), num_grad_banks);
  if (instance_align > 0) d = mix(d, instance_align);
  return mix(mix(d, tile_bytes), allow_cross_domain);
}

EngineLayout::EngineLayout(const EngineConfig& c)
    : slot_offset(c.num_banks * c.segment_bytes.size()),
      grad_offset(c.num_grad_banks * c.grad_bytes.size()),
      region_offset(c.segment_bytes.size()),
      instance_align(c.instance_align),
      instance_offset(c.segment_bytes.size()),
      grad_instance_offset(c.grad_bytes.size()),
      local_idx(c.num_experts),
      num_local_experts(c.domain.size()) {
  for (int32_t e = 0; e < c.num_experts; ++e) local_idx[e] = num_local_experts[c.home[e]]++;
  max_local_experts = *std::max_element(num_local_experts.begin(), num_local_experts.end());
  int64_t tiles = 0;
  for (size_t i = 0; i < c.segment_bytes.size(); ++i) {
    tiles += ceil_div(c.segment_bytes[i], c.tile_bytes);
    region_offset[i] = round_up(region_bytes, kSegmentAlign);
    region_bytes = region_offset[i] + max_local_experts * c.segment_bytes[i];
  }
  region_bytes = round_up(region_bytes, kSlotAlign);
  for (const int64_t bytes : c.segment_bytes) {
    check.first_block.push_back(check.blocks);
    check.blocks += ceil_div(bytes, kCheckBlock);
  }
  const auto ranks = static_cast<int64_t>(c.domain.size());
  check.verdicts = round_up(max_local_experts * ranks * 8, kFlagLine);
  check.sums = round_up(check.verdicts + ranks * 8, kFlagLine);
  check.copies = round_up(check.sums + max_local_experts * check.blocks * 8, kSlotAlign);
  check.total = check.copies + region_bytes;
  const int64_t finest = TileMap::tiles_per_group(c.tile_bytes);
  symmetric =
      SymmetricLayout::make(c.topology(), max_local_experts, ceil_div(tiles, finest),
                            static_cast<int32_t>(c.segment_bytes.size()), c.segment_bytes.data(),
                            slot_offset.data(), gradients(c), c.tile_bytes, grad_offset.data(),
                            c.num_banks, c.num_grad_banks, c.instance_align);
  if (c.instance_align == 0) return;
  const auto place = [&](const std::vector<int64_t>& bytes, std::vector<int64_t>& offset) {
    return place_instances(static_cast<int32_t>(bytes.size()), bytes.data(), max_local_experts,
                           c.slots_per_rank, c.instance_align, 0, offset.data());
  };
  instance_bytes = place(c.segment_bytes, instance_offset);
  grad_instance_bytes = place(c.grad_bytes, grad_instance_offset);
}

Gradients EngineLayout::gradients(const EngineConfig& c, int32_t bank) const {
  return {static_cast<int32_t>(c.grad_bytes.size()), c.grad_bytes.data(), c.grad_type.data(),
          grad_offset.data() + std::max(bank, 0) % c.num_grad_banks * c.grad_bytes.size()};
}

GroupTables EngineLayout::tables(const EngineConfig& c) const {
  return {c.topology(), c.rank,      c.segment_bytes.data(), local_idx.data(), c.tile_bytes,
          c.cost,       gradients(c)};
}

Capacity EngineLayout::capacity(const EngineConfig& c) const {
  const std::set<int32_t> domains(c.domain.begin(), c.domain.end());
  return {static_cast<int32_t>(c.domain.size()),
          c.num_experts,
          c.slots_per_rank,
          num_local_experts[c.rank],
          static_cast<int32_t>(c.segment_bytes.size()),
          static_cast<int32_t>(c.grad_bytes.size()),
          c.num_banks,
          c.allow_cross_domain ? static_cast<int32_t>(domains.size()) : 1};
}

}  // namespace uec
