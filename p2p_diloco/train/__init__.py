"""The inner training of one peer: model, data, schedule, inner loop and the trainer process."""
