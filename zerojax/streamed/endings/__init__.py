"""What a streamed step does with a layer's gradient, and how it ends: five endings of one backward.

    ending          backward, at layer l                          after backward
    WholeTree       store g[l] on the device                      norm, clip, one update of the whole tree
    ByLayers        store g[l] in its tier                        norm; for each layer: fetch, scale, update, write back
      stores late                                                 the same; store s[l-1] while s[l] is fetched
    InBackward      fetch w[l], s[l]; update; write back          the leaves that are no stack of layers
      stores late   store s[l+1] while s[l] is fetched; update    the record of layer 0; fetch, update, write back the others
    OnHost          store g[l], on the device or on the host      norm; the host updates each layer
      in backward   the host updates layer l                      the other leaves
    Delayed         store g[l] on the host; take over what it     the other leaves
                    made of layer l's gradient of the last step

An ending carries values through the loop of backward. All carry the sum of squares of the gradients
so far. `StoredGrads` also carries the stacks of gradients, and `InBackward` the state that it is
updating. Clipping is exact: gradients are scaled when those of all layers are known. An update in
backward comes before that, and so it cannot clip.

    interface       of endings, and what backward hands to them
    stored          WholeTree, ByLayers, and GradsAlone, which updates nothing
    in_backward     InBackward
    beside_drain    the leaves that are no stack of layers, updated while the last record is stored
    on_host         OnHost, HostInBackward, Delayed
"""
