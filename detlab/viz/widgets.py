class Explorer: pass
