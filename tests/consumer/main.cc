// Two ranks of one group, as threads, replicate an expert: the host engine from C++.
#include <core/schedule/schedule.hpp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <host/engine.hpp>
#include <numeric>
#include <thread>
#include <vector>

namespace host = uec::host;

int main() {
  constexpr int64_t kExpertBytes = 300'001;
  uec::EngineConfig config;
  config.num_experts = 2;
  config.slots_per_rank = 1;
  config.home = {0, 1};
  config.domain = {0, 0};
  config.segment_bytes = {kExpertBytes};
  const uec::EngineLayout layout(config);

  const auto bytes = static_cast<size_t>(layout.symmetric.total);
  auto* const memory = static_cast<uint8_t*>(std::aligned_alloc(uec::kSlotAlign, 2 * bytes));
  std::memset(memory, 0, 2 * bytes);
  config.bases = {memory, memory + bytes};

  std::vector<uint8_t> weights(kExpertBytes);
  std::iota(weights.begin(), weights.end(), uint8_t{3});
  const std::vector<int32_t> plan{-1, 0};  // a replica of expert 0 in the slot of rank 1

  bool ok[2] = {};
  const auto run = [&](int32_t rank) {
    uec::EngineConfig own = config;
    own.rank = rank;
    host::Engine engine(own);
    const uint64_t main = reinterpret_cast<uint64_t>(weights.data());
    const int32_t segment = 0;
    uec::ReplicateArgs args;
    args.slot_expert = plan.data();
    args.main_ptrs = &main;
    args.segments = &segment;
    args.num_segments = 1;
    uec::Mode mode;
    ok[rank] =
        engine.wait(engine.replicate(args, /*background=*/false, &mode)) && engine.close() == -1;
  };
  std::thread other(run, 1);
  run(0);
  other.join();

  const bool same =
      std::memcmp(memory + bytes + layout.slot_offset[0], weights.data(), kExpertBytes) == 0;
  std::free(memory);
  std::printf("%s\n", ok[0] && ok[1] && same ? "replicated" : "failed");
  return ok[0] && ok[1] && same ? 0 : 1;
}
