// What a worker needs beside a call, in memory of its own.
#pragma once

#include <cstdint>
#include <vector>

#include "core/transfer/stripe.hpp"

struct WorkerScratch {
  WorkerScratch(int64_t num_ranks, int64_t pieces)
      : memory(uec::StripeScratch::cut(nullptr, num_ranks, pieces, &stripe) / 8) {
    uec::StripeScratch::cut(reinterpret_cast<std::byte*>(memory.data()), num_ranks, pieces,
                            &stripe);
  }
  WorkerScratch(const WorkerScratch&) = delete;
  WorkerScratch(WorkerScratch&&) = default;

  uec::StripeScratch stripe;
  std::vector<uint64_t> memory;
};
