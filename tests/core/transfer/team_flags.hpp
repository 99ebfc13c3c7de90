// What all tests of teams share: records of calls, flags in plain memory, and values to agree on.
#pragma once

#include <atomic>
#include <type_traits>

#include "core/crowd.hpp"
#include "core/transfer/protocol.hpp"

namespace team_tests {

inline constexpr uint64_t kFirstEpoch = 7, kDigest = 0x123456789ABCDEF;
inline constexpr int32_t kSizes[] = {1, 2, 3, 5, 8};  // of teams

inline uint64_t record_of(uint64_t epoch, uec::RecordKind kind = uec::RecordKind::kCall,
                          uint64_t digest = kDigest) {
  return uec::CallRecord::make(epoch, digest, kind).word;
}

// The flags of a rank, for a policy Memory. A World has word(), counts and gone.
template <class World, class AnyTeam>
class FlagMemory {
 public:
  using Team = AnyTeam;

  FlagMemory(World& world, int32_t rank) : world_(world), rank_(rank) {}

  uint64_t observe(int64_t offset) {
    return world_.word(rank_, offset).load(std::memory_order_acquire);
  }
  void publish(uec::Delivered, int32_t rank, int64_t offset, uint64_t value) {
    world_.counts[rank][offset / 8].fetch_add(1, std::memory_order_relaxed);
    world_.word(rank, offset).store(value, std::memory_order_release);
  }
  bool peer_gone(int32_t rank) { return world_.gone[rank].load(std::memory_order_acquire); }

 private:
  World& world_;
  int32_t rank_;
};

// Checks that all members of the team have this value.
template <class Team>
void agree(uint64_t value) {
  if constexpr (std::is_same_v<Team, Crowd>) Crowd::agree(value);
}

}  // namespace team_tests
