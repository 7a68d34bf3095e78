"""What can be read off an activation: linear probes with their controls, the lenses, and signal against default.

Arrays go in, frozen results come out. Nothing here knows a model, a tokenizer or a file format, so every number can be
recomputed from saved arrays, and every result carries what an auditor needs: fold ids, null draws, n and method.

- `probes.linear`: is the answer linearly decodable at a layer, and does the same direction read other rows?
- `probes.controls`: how sure is that: intervals, first layer above a threshold, paired contrasts, power.
- `probes.baselines`: what would prompt length or the bag of tokens give?
- `probes.lens`, `probes.tuned_lens`: what would the model say if it stopped at this layer?
- `probes.decompose`: how much of the readout is the instance (signal s), how much a standing pull to "yes" (default δ)?
- `probes.components`: which embedding, head or MLP carries them?
- `probes.failures`: a wrong readout gets one label: overridden, lost, reversed, not decodable or mixed.

Decodable does not mean used. A probe shows that the answer can be read from a layer, not that the model reads it there.
Report it beside an intervention on the same layer.
"""
