// From a minibatch's logits to the gradient of its mean loss.
#pragma once

#include "loss.h"
#include "terms.h"

namespace {

class Objective {
  public:
    // Turns the batch's logits, [group][class], into the gradient of its mean loss, and their derivative along the partner
    // (``moving``, or null) likewise; returns the sum of its records' losses. ``features``: [group], ``numbers`` each.
    double turn(const Batch& batch, vec* logits, vec* moving, const vec* features, long numbers) {
        double loss = batch.terms ? add(batch, logits, features, numbers) : 0;
        for (int group = 0; group < batch.groups; group++, logits += batch.classes) {
            if (batch.terms) adjust(*batch.terms, batch.classes, logits);
            loss += group_loss(batch, group, logits, moving ? moving + group * batch.classes : nullptr);
            if (batch.terms) adjust_back(*batch.terms, batch.classes, by_logits_.data() + group * batch.classes, logits);
        }
        return loss;
    }

    // What the terms add to the gradient by the features, [group][feature]; null: nothing.
    const vec* by_features(const Batch& batch) const {
        return batch.terms && batch.terms->look_at_features() ? by_features_.data() : nullptr;
    }

  private:
    double add(const Batch& batch, const vec* logits, const vec* features, long numbers) {
        by_logits_.assign(batch.groups * batch.classes, vec{});
        const double loss = add_terms(*batch.terms, batch, logits, by_logits_.data());
        if (!batch.terms->look_at_features()) return loss;
        row_.resize(numbers), by_features_.assign(batch.groups * numbers, vec{});
        return loss + add_feature_terms(*batch.terms, batch, features, numbers, row_.data(), by_features_.data());
    }

    std::vector<vec> by_logits_, by_features_;  // what terms add to the gradient
    std::vector<vec> row_;                      // a group's leads or prototypes
};

}  // namespace
