"""The frame of training: what is mixed, how, by which recursion, and when.

`buckets` has parameters as views of flat memory, which exchanges use where it is. `mixing` says whom ranks average
with, round by round, and `mixer` makes one exchange of buckets a round. `algorithm` is the frame of recursions, around
the optimizer's step; `overlapping` begins them with a forward pass, `window_algorithm` over one-sided windows,
`backward_steps` and `gradient_exchange` as gradients become ready. `view` is the user's optimizer with communication
around it. The rest says when: hooks, passes, a gradient scaler's steps.
"""
