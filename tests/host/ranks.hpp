// All ranks of a group in one process, over plain zeroed memory, with payloads that prove
// themselves.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "core/base/digest.hpp"
#include "host/engine.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

// Bytes of (seed, expert, segment): a window of random bytes at a place chosen by these. Windows
// of two payloads, or of one payload at two offsets, do not agree.
class Payload {
 public:
  explicit Payload(int64_t max_bytes) : bytes_(max_bytes + kPlaces) {
    Random random(1);
    for (uint8_t& byte : bytes_) byte = static_cast<uint8_t>(random());
  }
  const uint8_t* of(uint64_t seed, int32_t expert, size_t segment) const {
    return bytes_.data() + uec::mix(uec::mix(uec::mix(0, seed), expert), segment) % kPlaces;
  }

 private:
  static constexpr uint64_t kPlaces = 1 << 16;
  std::vector<uint8_t> bytes_;
};

// Waits for a call that must succeed.
inline void wait_ok(uec::host::Engine& engine, uint64_t epoch) {
  if (engine.wait(epoch)) return;
  const uec::Report report = engine.report();
  std::fprintf(stderr, "%s:%d: call %llu failed in %llu: fault %d, flag %d of rank %d, root %d\n",
               __FILE__, __LINE__, static_cast<unsigned long long>(epoch),
               static_cast<unsigned long long>(report.epoch), static_cast<int>(report.fault),
               static_cast<int>(report.wait.flag), report.wait.peer, report.root);
  std::exit(1);
}

struct GroupOptions {
  std::vector<int64_t> segment_bytes{100};
  std::vector<int64_t> grad_bytes{};  // of gradients in a slot; none: there are none
  std::vector<uec::GradType> grad_type{};
  int32_t num_banks = 1, num_grad_banks = 1;
  int64_t instance_align = 0;
  int64_t tile_bytes = 32 << 10;
  int32_t num_workers = 1;
  bool check = false;                             // slots are compared with their homes
  double call_timeout = 120, wait_timeout = 120;  // far beyond what a busy machine needs
  std::vector<std::vector<int>> peer_pipes{};     // [rank][peer]
  std::vector<std::vector<int>> peer_processes{};
};

class Ranks {
 public:
  static constexpr uint8_t kUntouched = 0xE7;

  Ranks(const PlanCase& group, const GroupOptions& options) : group_(group), options_(options) {
    uec::EngineConfig config;
    config.num_experts = group.num_experts;
    config.slots_per_rank = group.slots_per_rank;
    config.home = group.home;
    config.domain = group.domain;
    config.allow_cross_domain = group.allow_cross_domain;
    config.segment_bytes = options.segment_bytes;
    config.grad_bytes = options.grad_bytes;
    config.grad_type = options.grad_type;
    config.num_banks = options.num_banks;
    config.num_grad_banks = options.num_grad_banks;
    config.instance_align = options.instance_align;
    config.tile_bytes = options.tile_bytes;
    config.num_workers = options.num_workers;
    config.call_timeout = options.call_timeout;
    config.wait_timeout = options.wait_timeout;
    // Constants of a machine on which relays pay off for some plans and not for others.
    config.cost = {100'000, 50'000, 2'000'000, 2'000'000, 8};
    const uec::EngineLayout layout(config);
    for (int32_t r = 0; r < group.num_ranks; ++r) {
      memory_.push_back(allocate(layout.symmetric.total));
      config.bases.push_back(memory_.back().get());
    }
    for (int32_t r = 0; r < group.num_ranks && options.check; ++r) {
      memory_.push_back(allocate(layout.check.total));
      config.check_bases.push_back(memory_.back().get());
    }
    for (int32_t r = 0; r < group.num_ranks; ++r) {
      config.rank = r;
      if (!options.peer_pipes.empty()) config.peer_pipes = options.peer_pipes[r];
      if (!options.peer_processes.empty()) config.peer_processes = options.peer_processes[r];
      engines_.push_back(std::make_unique<uec::host::Engine>(config));
    }
  }

  int32_t num_ranks() const { return group_.num_ranks; }
  const GroupOptions& options() const { return options_; }
  size_t num_segments() const { return options_.segment_bytes.size(); }
  uec::host::Engine& engine(int32_t rank) { return *engines_[rank]; }
  void drop_engines() { engines_.clear(); }
  const uec::EngineLayout& layout() const { return engines_[0]->layout(); }
  uint8_t* base(int32_t rank) { return memory_[rank].get(); }

  // Slots are counted through all banks.
  uint8_t* slot(int32_t rank, int32_t slot, size_t segment) {
    return base(rank) + place(layout().slot_offset, slot, segment, options_.segment_bytes);
  }

  uint8_t* slot_grad(int32_t rank, int32_t slot, size_t segment) {
    return base(rank) + place(layout().grad_offset, slot, segment, options_.grad_bytes);
  }

  // Main weights of all ranks. Each set, in order of creation, is a region on every rank.
  std::vector<std::unique_ptr<uint8_t[], decltype(&std::free)>> make_weights() {
    std::vector<std::unique_ptr<uint8_t[], decltype(&std::free)>> regions;
    std::vector<const uint8_t*> bases;
    for (int32_t r = 0; r < num_ranks(); ++r) {
      regions.push_back(allocate(kBefore + layout().region_bytes));
      bases.push_back(regions.back().get());
    }
    std::vector<int64_t> offset = layout().region_offset;
    for (int64_t& at : offset) at += kBefore;
    for (auto& engine : engines_) engine->add_region({bases, offset});
    return regions;
  }

  uint8_t* main(uint8_t* region, int32_t local_idx, size_t segment) const {
    return region + kBefore + layout().region_offset[segment] +
           local_idx * options_.segment_bytes[segment];
  }

  void fill_weights(int32_t rank, uint8_t* region, const Payload& payload, uint64_t seed) const {
    for (int32_t e = 0; e < group_.num_experts; ++e)
      for (size_t i = 0; i < num_segments() && group_.home[e] == rank; ++i)
        std::memcpy(main(region, layout().local_idx[e], i), payload.of(seed, e, i),
                    options_.segment_bytes[i]);
  }

  // [segments][M] addresses.
  std::vector<uint64_t> addresses(int32_t rank, uint8_t* region) const {
    std::vector<uint64_t> list;
    for (size_t i = 0; i < num_segments(); ++i)
      for (int32_t m = 0; m < layout().num_local_experts[rank]; ++m)
        list.push_back(reinterpret_cast<uint64_t>(main(region, m, i)));
    return list;
  }

  // Submits a copy of experts and returns its epoch.
  uint64_t replicate(int32_t rank, const std::vector<int32_t>& plan,
                     const std::vector<uint64_t>& main_ptrs, uec::Mode mode, bool background,
                     const std::vector<int32_t>& segments = {0}) {
    return engine(rank).replicate({.slot_expert = plan.data(),
                                   .plan_digest = 0,
                                   .main_ptrs = main_ptrs.data(),
                                   .segments = segments.data(),
                                   .num_segments = static_cast<int32_t>(segments.size()),
                                   .mode = static_cast<int32_t>(mode),
                                   .region = mode == uec::Mode::kPull ? 0 : -1},
                                  background, &mode);
  }

  void fill_slots(int32_t rank) {
    for (size_t i = 0; i < num_segments(); ++i)
      for (int32_t s = 0; s < options_.num_banks * group_.slots_per_rank; ++s)
        std::memset(slot(rank, s, i), kUntouched, options_.segment_bytes[i]);
  }

  // The slot holds the expert's payload, or (`expert` < 0) nothing was written to it.
  void check_slot(int32_t rank, int32_t slot_idx, size_t segment, int32_t expert,
                  const Payload& payload, uint64_t seed) {
    const uint8_t* const at = slot(rank, slot_idx, segment);
    const int64_t bytes = options_.segment_bytes[segment];
    if (expert >= 0) {
      CHECK(std::memcmp(at, payload.of(seed, expert, segment), bytes) == 0);
    } else {
      const std::vector<uint8_t> untouched(bytes, kUntouched);
      CHECK(std::memcmp(at, untouched.data(), bytes) == 0);
    }
  }

  // Runs body(rank) on a thread for each rank.
  template <class Body>
  void on_each(Body&& body) {
    std::vector<std::thread> threads;
    for (int32_t r = 0; r < num_ranks(); ++r) threads.emplace_back([&body, r] { body(r); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  static constexpr int64_t kBefore = 512;  // bytes of a region that are nobody's

  int64_t place(const std::vector<int64_t>& offset, int32_t slot, size_t segment,
                const std::vector<int64_t>& bytes) const {
    const int32_t slots = std::max(group_.slots_per_rank, 1);
    const size_t row = slot / slots * bytes.size();
    return offset[row + segment] + slot % slots * bytes[segment];
  }

  static std::unique_ptr<uint8_t[], decltype(&std::free)> allocate(int64_t bytes) {
    bytes = uec::round_up(std::max<int64_t>(bytes, 1), uec::kSlotAlign);
    auto* const at = static_cast<uint8_t*>(std::aligned_alloc(uec::kSlotAlign, bytes));
    CHECK(at != nullptr);
    std::memset(at, 0, bytes);
    return {at, &std::free};
  }

  PlanCase group_;
  GroupOptions options_;
  std::vector<std::unique_ptr<uint8_t[], decltype(&std::free)>> memory_;
  std::vector<std::unique_ptr<uec::host::Engine>> engines_;
};
