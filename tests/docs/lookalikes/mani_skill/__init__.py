"""A stand-in with the interface of ManiSkill, which needs SAPIEN and Vulkan."""
