// The loss of a minibatch: from its logits to the gradient of its mean loss.
#pragma once

#include "loss.h"
#include "terms.h"

namespace {

class Objective {
  public:
    // Replaces the batch's logits, [group][class], by the gradient of its mean loss. ``moving``: null, or the derivative of the
    // logits along the partner record, which is replaced by the loss's gradient, too. ``features``: [group], ``numbers`` each.
    // Returns the sum of the records' losses.
    double turn(const Batch& batch, vec* logits, vec* moving, const vec* features, long numbers) {
        double loss = batch.terms ? add(batch, logits, features, numbers) : 0;
        for (int group = 0; group < batch.groups; group++, logits += batch.classes) {
            if (batch.terms) adjust(*batch.terms, batch.classes, logits);
            loss += group_loss(batch, group, logits, moving ? moving + group * batch.classes : nullptr);
            if (batch.terms) adjust_back(*batch.terms, batch.classes, by_logits_.data() + group * batch.classes, logits);
        }
        return loss;
    }

    // Returns the gradient of the loss terms by the features, [group][feature]; null if there is none.
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

    std::vector<vec> by_logits_, by_features_;  // the gradient of the loss terms by logits and by features
    std::vector<vec> row_;                      // the leads (contrast.h) or prototypes (pull.h) of a group
};

}  // namespace
