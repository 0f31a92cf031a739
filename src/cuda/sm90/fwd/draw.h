// Dropout's random numbers of a tile, drawn between its exponentials. One after the other their integer instructions
// take two to three times as long while products run.
#pragma once
#include "cuda/fragment/dropout.h"

namespace octet::cuda::sm90 {

template <int Columns>
class Draw {
  using Kept = KeptElements<Columns, RowTokens::queries>;

 public:
  // See KeptElements.
  __device__ Draw(const Dropout& dropout, int sequence, int head, int row, int column)
      : dropout_(dropout),
        stream_(dropout.stream(sequence, head)),
        places_(dropout.places_of(sequence)),
        row_(row),
        column_(column),
        groups_(Kept::groups(row, column, places_)) {}
  // Draws them between the exponentials of the tile: group i of this thread waits for the one of element 16 i, or ptxas
  // would put all before them.
  __device__ void beside(const Accumulator<Columns>& exponentials) {
    const uint32_t zero = dropout_.dropped / kDropoutOne;
    int element = 0;
    for (int& keys : groups_.keys) keys += __float_as_uint(exponentials.x[element]) & zero, element += 16;
    kept_.draw(stream_, dropout_.dropped, groups_);
    kept_.pin();
  }
  __device__ const Kept& kept() {
    kept_.exchange(stream_, dropout_.dropped, row_, column_, groups_, places_);
    return kept_;
  }

 private:
  const Dropout& dropout_;
  DropoutStream stream_;
  KeyPlaces places_;
  int row_, column_;
  typename Kept::Groups groups_;
  Kept kept_;
};

// Nothing is drawn.
struct NoDraw {};

}  // namespace octet::cuda::sm90
