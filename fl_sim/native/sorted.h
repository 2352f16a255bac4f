// Rows sorted by class, so that each row is multiplied by the weights of its own class only.
#pragma once

#include "products.h"

namespace {

// The positions of rows that are sorted by class. The rows of each class begin at a multiple of TILE.
class Sorted {
  public:
    struct Group {
        long number, first, count;  // the class; its first row; the number of its rows
        long filled_up() const { return filled(count, TILE); }
    };

    // Sorts ``num_rows`` rows by ``class_of(row)``, which must be below ``num_classes``.
    template <class Of>
    void sort(long num_rows, long num_classes, const Of& class_of) {
        classes_.resize(num_rows), places_.resize(num_rows), next_.assign(num_classes, 0), groups_.clear(), count_ = 0;
        for (long row = 0; row < num_rows; row++) next_[classes_[row] = class_of(row)]++;
        for (long number = 0; number < num_classes; number++) {
            const Group group{number, count_, next_[number]};
            if (group.count) groups_.push_back(group);
            next_[number] = count_, count_ += group.filled_up();
        }
        for (long row = 0; row < num_rows; row++) places_[row] = next_[classes_[row]]++;
    }

    long count() const { return count_; }  // the number of rows, including the padding of groups
    long place(long row) const { return places_[row]; }
    bool are_alike(long row, long other) const { return classes_[row] == classes_[other]; }
    const std::vector<Group>& groups() const { return groups_; }

    // Calls ``act(row)`` for every row that is padding of a group.
    template <class Act>
    void for_fillers(const Act& act) const {
        for (const Group& group : groups_)
            for (long row = group.first + group.count; row < group.first + group.filled_up(); row++) act(row);
    }

  private:
    std::vector<long> classes_, places_, next_;
    std::vector<Group> groups_;
    long count_ = 0;
};

}  // namespace
