// A worker whose two sides one thread alternates.
#pragma once

#include "core/transfer/fetcher.hpp"
#include "core/transfer/storer.hpp"

namespace uec {

template <class Memory, class Mover>
class Worker {
 public:
  // Takes what Fetcher takes.
  Worker(const Call& call, Memory& memory, Mover& mover, const StripeScratch& scratch,
         const Stripe& stripe)
      : fetcher_(call, memory, mover, scratch, stripe),
        storer_(call, memory, mover, unpublished_) {}

  Fault fault() const {
    return fetcher_.fault() != Fault::kNone ? fetcher_.fault() : storer_.fault();
  }
  Wait wait() { return storer_.fault() != Fault::kNone ? storer_.wait() : fetcher_.wait(); }

  Step fetch_step() { return storer_.fault() != Fault::kNone ? Step::kFailed : fetcher_.step(); }
  Step store_step() { return fetcher_.fault() != Fault::kNone ? Step::kFailed : storer_.step(); }

  // Blocked only when neither side can do anything.
  Step step() {
    const Step fetched = fetch_step(), stored = store_step();
    if (fetched == Step::kFailed || stored == Step::kFailed) return Step::kFailed;
    if (stored == Step::kFinished) return Step::kFinished;
    if (fetched == Step::kWaitsForPeer && stored == Step::kNeedsFetch) return Step::kWaitsForPeer;
    return Step::kProgress;
  }

  // After a failure, in place of the others. In this order, because the store side may release the
  // stage that the fetch side's end marker needs, and that marker is what the store side waits for.
  Step drain_step() {
    const Step stored = storer_.drain_step(), fetched = fetcher_.drain_step();
    return fetched == Step::kProgress ? fetched : stored;
  }

 private:
  Fetcher<Memory, Mover> fetcher_;
  UnpublishedGroup unpublished_[kMaxUnpublished] = {};
  Storer<Memory, Mover> storer_;
};

}  // namespace uec
