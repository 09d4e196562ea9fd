"""The parts of a job's body that several checks name, as `param` of their errors."""

GRADER_PARAM = "method.reinforcement.grader"
SHADOW_PARAM = "method.reinforcement.shadow_grader"
FORMAT_PARAM = "method.reinforcement.response_format"
TOOLS_PARAM = "method.reinforcement.tools"
STEPS_PARAM = "method.reinforcement.max_episode_steps"
ENVIRONMENT_PARAM = "method.reinforcement.environment"
TEACHER_PARAM = "method.distillation.teacher.model"
