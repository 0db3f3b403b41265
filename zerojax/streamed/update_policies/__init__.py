"""What a streamed step does with a layer's gradient, and when it updates.

    policy            backward, at layer l             after backward
    UpdateWholeTree   store g[l] on the device         norm, clip, one update of the full tree
    UpdateByLayer     store g[l] in its tier           norm; for each layer: fetch, clip, update,
                                                       write back
      stores late                                      as above, but store s[l-1] while s[l] is
                                                       fetched
    UpdateInBackward  fetch w[l], s[l]; update;        the unstacked leaves
                      write back
      stores late     store s[l+1] while s[l] is       the record of layer 0; fetch, update, write
                      fetched; update                  back the unstacked leaves
    UpdateInForward   store g[l] in its tier           norm; the next step's forward fetches,
                                                       clips, updates and writes back each layer
    HostUpdateInForward
                      stash g[l] on the host           norm; the host updates each layer before the
                                                       next step's forward asks for it
    OnHost            store g[l], on the device or     norm; the host updates each layer
                      on the host
    HostUpdateInBackward
                      the host updates layer l         the unstacked leaves
    Delayed           store g[l] on the host; take     the unstacked leaves
                      over the host's update from
                      layer l's previous gradient

An update policy carries values through the loop of backward. All policies carry the sum of squares
of the gradients so far. `StoredGrads` also carries the stacks of gradients, and `UpdateInBackward`
the state that it updates. Clipping is exact: gradients are scaled after all layers' gradients are
known. An update in backward runs before that, so it cannot clip. `GradsAlone` updates nothing: it
returns the gradients.

    interface       the interface of the policies, and the inputs that backward gives them
    stored          UpdateWholeTree, UpdateByLayer, and GradsAlone
    in_backward     UpdateInBackward
    in_forward      UpdateInForward
    in_forward_on_host
                    HostUpdateInForward
    beside_drain    the update of unstacked leaves while the last record is stored
    on_host         OnHost, HostUpdateInBackward, Delayed
"""
